"""Embeddings, scores and classes over HTTP: OpenAI's /v1/embeddings, and vLLM's, Cohere's and Jina's routes."""
