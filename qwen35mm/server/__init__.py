"""OpenAI's and Anthropic's protocols over HTTP, without the chat page and its libraries."""
