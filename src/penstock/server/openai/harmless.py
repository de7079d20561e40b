"""Body fields outside OpenAI's schema that known clients send and that cannot change the answer.

They are accepted and named in the response header x-penstock-ignored. A field that would change the answer, or add to it, does
not belong here: the server refuses it by name."""

IGNORED: dict[str, str] = {
    "session_id": "vLLM, SGLang, Open WebUI: attribution and routing",
    "chat_id": "Open WebUI", "id": "Open WebUI", "message_id": "Open WebUI", "parent_id": "Open WebUI",
    "background_tasks": "Open WebUI: titles and tags, made by itself", "model_item": "Open WebUI: its own model entry",
    "keep_alive": "Ollama: how long a model stays loaded; here it always does",
    "detokenize": "vLLM's engine parameter; answers of the API are text",
    "stream_interval": "vLLM, SGLang: how many tokens an event may gather", "min_characters": "vLLM reads no such field",
    "kv_transfer_params": "vLLM, beside token ids: for its connector, and there is none here; other routes refuse it",
    **dict.fromkeys(("conversation_id", "user_id", "user_email", "end_user", "username", "client_id", "customer_identifier",
                     "organization_id", "thread_id", "run_id"), "attribution"),
    **dict.fromkeys(("trace_id", "span_id", "trace", "tags"), "tracing"),
    **dict.fromkeys(("request_timeout", "timeout", "num_retries", "max_retries"), "the client's own limit"),
    **dict.fromkeys(("routing_key", "data_parallel_rank", "routed_dp_rank"), "SGLang: for its router"),
    "rid": "SGLang: the request's id", "priority_class": "for gateways",
    "no_logs": "SGLang: logging", "custom_labels": "SGLang: labels of metrics", "kv_hints": "vLLM, SGLang: hints of a router",
    "provider": "OpenRouter: which provider serves", "route": "OpenRouter: fallback", "preset": "OpenRouter",
    "caching": "LiteLLM: its own cache", "cache": "LiteLLM: its own cache", "no-log": "LiteLLM: logging",
    "guardrails": "LiteLLM: its own checks", **dict.fromkeys((
        "litellm_metadata", "litellm_call_id", "litellm_session_id", "litellm_trace_id", "litellm_logging_obj",
        "proxy_server_request", "model_info", "mock_timeout"), "LiteLLM"),
}
"""Field name -> which client sends it, and its purpose."""
