"""What a format of weights, or of keys and values, costs: distributions against a reference's, and the bundled model's
skills."""
