"""A user's own nn.Module as named layers."""
