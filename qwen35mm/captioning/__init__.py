"""Captions of folders and datasets; see `run`."""
