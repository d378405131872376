"""Studies of published papers, a file each, beside the papers' figures.

`python -m scripts.reproduce.NAME`.
"""
