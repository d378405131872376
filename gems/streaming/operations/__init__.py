"""The operations of a network in strips."""
