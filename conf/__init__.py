"""The configuration files of Hydra: groups, and experiments that choose among them."""
