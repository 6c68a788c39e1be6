"""Turns the sources that a person names into items."""
