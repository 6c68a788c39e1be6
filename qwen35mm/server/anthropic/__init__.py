"""Anthropic's messages protocol."""
