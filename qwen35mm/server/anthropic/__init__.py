"""Anthropic's form: messages."""
