"""The torch modules behind the zoo's layers.

A layer as data names one as "gems.models.blocks.<file>:<class>".
No module works in place: a block's input is the leaf of its stage, and an executor may keep or move
activations.
"""
