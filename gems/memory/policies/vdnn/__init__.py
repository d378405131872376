"""vDNN: its policies for a run, and in `paper` the studies of its paper."""
