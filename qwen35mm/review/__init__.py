"""The web page for reviewing captions."""
