"""The rows of layers that process an image strip by strip (no torch here).

It plans the rows that each layer makes, reads and keeps.
"""
