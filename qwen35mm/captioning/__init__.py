"""Captions folders and datasets; see `run`."""
