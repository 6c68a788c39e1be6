"""The page on which a person goes through captions."""
