"""What the model is asked, and what becomes of its words."""
