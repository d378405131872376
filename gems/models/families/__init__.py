"""Published networks, one file for each family.

A family is a function from a configuration to named layers.
"""
