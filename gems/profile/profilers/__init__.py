"""How profiles are taken: measured on this device, or with fake tensors. Needs torch."""
