"""OpenAI's forms: chat completions, responses, completions and embeddings."""
