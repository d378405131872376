"""The torch modules of the zoo's layers.

A layer names its module as "gems.models.blocks.<file>:<class>". No module works in place: the input
of a block is the leaf of its stage, and an executor may keep or move activations.
"""
