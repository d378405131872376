"""The zoo: published networks, one file a family, each a function from a configuration to named layers."""
