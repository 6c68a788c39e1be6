"""A run's memory, and atomic writing of its files."""
