"""Reads media in child processes, and compares how they look."""
