"""The verbs of `python -m gems`, one file each."""
