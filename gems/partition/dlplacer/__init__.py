"""DLPlacer: the operators of one model on several devices (Pal et al. 2019, arXiv 1907.13257).

`place` is the entry point. A graph is split at its cut vertices (`subgraphs`). Each subgraph is
solved exactly (by CP-SAT, or as a MILP if OR-tools is missing), starting from a list schedule
(`heft`), and the answers are joined. All functions are pure.
"""
