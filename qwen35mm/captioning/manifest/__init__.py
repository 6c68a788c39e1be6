"""What a run remembers, and how it writes so that nothing tears."""
