"""OpenAI's responses.

bodies, item_bodies  request bodies
items, request       from bodies to messages for the model
events               the answer and its stream events
kept                 responses by their ids, in a store of conversations
routes               the handlers
"""
