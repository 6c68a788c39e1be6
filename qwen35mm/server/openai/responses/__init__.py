"""OpenAI's responses.

bodies, item_bodies  what requests hold
items, request       those as what is asked of the model
events               its answer as a client reads it
kept                 responses by their ids, in a store of conversations
routes               the handlers
"""
