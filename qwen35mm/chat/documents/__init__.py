"""Texts that are attached to a message, whatever file they come in."""
