"""From a person's message to the model's reply."""
