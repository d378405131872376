"""The search for plans: which configuration to run, and how to spend devices. Pure: no torch, no MPI, no Hydra."""
