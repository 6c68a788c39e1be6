"""From a person's message to a reply that is written."""
