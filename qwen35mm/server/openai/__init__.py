"""OpenAI's protocols: chat completions, responses, completions and embeddings."""
