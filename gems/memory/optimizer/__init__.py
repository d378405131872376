"""The optimal plan: for each layer keep, recompute or offload, by a programme, windows for its copies, and a search."""
