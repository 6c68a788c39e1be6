"""Checkpoint files: reading their headers and tensors, and mapping tensors to the model's parameters."""
