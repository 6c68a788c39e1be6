"""Stored conversations and their files: records, the database, archives."""
