"""Experiments: what is run, its directory, checkpoints, reports as it goes."""
