"""Completions and embeddings of plain text, without a template.

completions  OpenAI's older completions: request bodies and replies
embeddings   OpenAI's embeddings: request bodies and replies
routes       the handlers
"""
