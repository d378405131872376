"""The configuration: its schema and constraints, how it is composed and resolved, and the identity of a run."""
