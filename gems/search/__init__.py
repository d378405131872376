"""The search for plans: configurations, and the use of devices. No torch, no MPI, no Hydra."""
