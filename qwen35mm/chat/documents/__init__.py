"""Text and PDF files that are attached to a message."""
