"""Texts without a template, over HTTP.

completions  OpenAI's older completions: what requests hold, and replies as clients read them
embeddings   the same of embeddings
routes       the handlers
"""
