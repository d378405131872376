"""The studies of published papers, recomputed beside the papers' figures."""
