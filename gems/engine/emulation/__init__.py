"""Runs on emulated devices: real ranks and messages, timed waits for compute."""
