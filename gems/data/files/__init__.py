"""Read files of images and masks, and refuse files that would be misread."""
