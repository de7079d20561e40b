"""vLLM's own routes beside OpenAI's API."""
