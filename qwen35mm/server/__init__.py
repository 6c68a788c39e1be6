"""The model for programs: OpenAI's protocol over HTTP, without the chat page and its libraries."""
