"""Which configuration to spend devices on: end-to-end time of data, model and hybrid parallelism. Pure: no torch, no MPI."""
