"""Examples of how to extend the toolkit, each one file."""
