"""Captions that a person reads, changes and counts: on a page, or by commands."""
