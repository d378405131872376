"""Analysis: tables and pictures from trace files alone."""
