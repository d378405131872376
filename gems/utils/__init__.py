"""What any part may use: a cache, files that appear whole, processes, quiet libraries.

No torch, no MPI.
"""
