"""Published networks, one file per family.

A family is a function from a configuration to named layers.
"""
