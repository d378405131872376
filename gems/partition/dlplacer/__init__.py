"""DLPlacer: the operators of one model on several devices (Pal et al. 2019, arXiv 1907.13257).

Pure.
`place` answers. A graph falls into subgraphs at its cut vertices (`subgraphs`), each is solved
exactly (`exact`, or `MILP` where OR-tools is missing) from a list schedule (`heft`), and the answer
is put together again.
"""
