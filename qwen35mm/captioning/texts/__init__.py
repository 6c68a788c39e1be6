"""Prompts for the model, and the way from its replies to captions."""
