"""Ranks as child processes of this machine, and programs that accompany them."""
