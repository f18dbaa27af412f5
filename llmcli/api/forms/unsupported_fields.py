"""Fields of other servers that are not supported and would change the answer. A request that sets
one of them is refused with the name of the field.

Unsupported fields that would not change the answer are ignored: store, metadata, service_tier,
user, safety_identifier, prompt_cache_key, prediction, cache_prompt.
"""

# Field of llama-server, vLLM or OpenAI -> the advice in the error message.
UNSUPPORTED_FIELDS = {
    "n_probs": "use logprobs and top_logprobs",
    "samplers": "the sampling steps run in a fixed order",
    "lora": "load it with the model",
    "t_max_predict_ms": "use max_tokens",
    "n_indent": "a grammar can enforce it",
    "guided_json": "use response_format",
    "guided_choice": "use grammar",
    "guided_regex": "use grammar",
    "guided_grammar": "use grammar",
    "structured_outputs": "use response_format or grammar",
    "stop_token_ids": "use stop with their text",
    "min_tokens": "use ignore_eos with max_tokens",
    "bad_words": "use logit_bias",
    "logits_processors": "the server runs no code of a request",
    "truncate_prompt_tokens": "a prompt is never shortened",
    "prompt_logprobs": "llmcli eval scores a text",
    "include_stop_str_in_output": "an answer ends before its stop sequence",
    "adapters": "load it with the model",
}
