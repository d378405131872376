"""Analysis: reads trace files only and makes tables and pictures of them."""
