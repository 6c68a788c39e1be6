"""The page in a desktop window."""
