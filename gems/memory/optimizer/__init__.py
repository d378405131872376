"""The optimal memory plan: a MILP over the choices per layer, copy windows, and a local search."""
