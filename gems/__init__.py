"""Training of deep networks on very large images, split over the ranks of a supercomputer."""

__version__ = "0.1.0"
