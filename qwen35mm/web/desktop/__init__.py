"""The page in a window of its own."""
