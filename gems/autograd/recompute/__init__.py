"""Layers whose forward is run a second time, with the same bits as once."""
