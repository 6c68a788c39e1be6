"""Conversations and their media in files: records, the database, archives."""
