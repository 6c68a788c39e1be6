"""One address for several engines."""
