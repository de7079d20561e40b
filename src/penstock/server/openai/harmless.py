"""Body fields outside OpenAI's schema that known clients send and that cannot change the answer.

They are accepted and named in the response header x-penstock-ignored. A field that would change the answer, or add to it, does
not belong here: the server refuses it by name."""

from __future__ import annotations

IGNORED: dict[str, str] = {
    "session_id": "vLLM, SGLang, Open WebUI: attribution and routing",
    "chat_id": "Open WebUI", "id": "Open WebUI", "message_id": "Open WebUI", "parent_id": "Open WebUI",
    "background_tasks": "Open WebUI: titles and tags, made by itself", "model_item": "Open WebUI: its own model entry",
    "keep_alive": "Ollama: how long a model stays loaded; here it always does",
    "detokenize": "vLLM's engine parameter; answers of the API are text",
    "stream_interval": "vLLM, SGLang: how many tokens an event may gather",
    "rid": "SGLang: the request's id", "conversation_id": "SGLang: attribution", "user_id": "attribution",
    "user_email": "attribution", "end_user": "attribution", "username": "attribution", "client_id": "attribution",
    "customer_identifier": "attribution", "organization_id": "attribution", "thread_id": "attribution",
    "run_id": "attribution", "trace_id": "tracing", "span_id": "tracing", "trace": "tracing", "tags": "tracing",
    "request_timeout": "the client's own limit", "timeout": "the client's own limit", "num_retries": "the client's own limit",
    "max_retries": "the client's own limit", "routing_key": "SGLang: for its router", "priority_class": "for gateways",
    "data_parallel_rank": "SGLang: for its router", "routed_dp_rank": "SGLang: for its router",
    "no_logs": "SGLang: logging", "custom_labels": "SGLang: labels of metrics", "kv_hints": "vLLM, SGLang: hints of a router",
    "provider": "OpenRouter: which provider serves", "route": "OpenRouter: fallback", "preset": "OpenRouter",
    "caching": "LiteLLM: its own cache", "cache": "LiteLLM: its own cache", "no-log": "LiteLLM: logging",
    "guardrails": "LiteLLM: its own checks", "litellm_metadata": "LiteLLM", "litellm_call_id": "LiteLLM",
    "litellm_session_id": "LiteLLM", "litellm_trace_id": "LiteLLM", "litellm_logging_obj": "LiteLLM",
    "proxy_server_request": "LiteLLM", "model_info": "LiteLLM", "mock_timeout": "LiteLLM",
}
"""Field name -> which client sends it, and its purpose."""
