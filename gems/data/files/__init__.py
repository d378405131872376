"""Reads files of images and masks, and refuses by name what would be misread."""
