"""Fields of other servers that would change the answer and that we do not have: they are refused by
name.

Fields that change nothing anybody reads are ignored: store, metadata, service_tier, user,
safety_identifier, prompt_cache_key, prediction (a guess that saves time), cache_prompt, id_slot,
timings_per_token, return_progress.
"""

# Field -> what there is instead. llama-server's, vLLM's, OpenAI's own.
UNKNOWN = {
    "n_probs": "logprobs and top_logprobs are",
    "samplers": "the steps run in one order",
    "lora": "load it with the model",
    "t_max_predict_ms": "max_tokens is",
    "n_indent": "a grammar can ask for it",
    "guided_json": "response_format is",
    "guided_choice": "a grammar is",
    "guided_regex": "a grammar is",
    "guided_grammar": "grammar is",
    "structured_outputs": "response_format and grammar are",
    "stop_token_ids": "stop takes their text",
    "min_tokens": "ignore_eos with max_tokens is",
    "bad_words": "logit_bias is",
    "logits_processors": "nothing of a request is run",
    "truncate_prompt_tokens": "nothing is cut out of a prompt",
    "prompt_logprobs": "eval scores a text",
    "include_stop_str_in_output": "an answer ends before what stops it",
    "adapters": "load it with the model",
}
