"""The configured run beside one unsplit process."""
