"""The activation store: what segments save, where it lies, and how it moves to host memory and back."""
