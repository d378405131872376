"""Ranks as child processes of this machine, and programs that run beside them."""
