"""The cost of formats of weights, keys and values: divergence from a reference, and the demo model's skills."""
