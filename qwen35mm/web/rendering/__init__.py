"""Renders conversations for the page: JSON values with safe HTML."""
