"""Messages between ranks over MPI."""
