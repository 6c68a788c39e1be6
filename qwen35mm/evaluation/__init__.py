"""What a format of weights costs: distributions against a reference's, and the bundled model's skills."""
