"""Conversations as the page draws them: JSON values with safe HTML."""
