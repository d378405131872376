"""The optimal plan: for each layer keep, recompute or offload, by a MILP, windows for its copies, and a search."""
