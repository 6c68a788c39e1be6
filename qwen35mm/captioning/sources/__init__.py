"""From what a person names to items."""
