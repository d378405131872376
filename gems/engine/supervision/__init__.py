"""What watches over ranks: failures, hangs, progress, samples and records."""
