"""Llama, Llama 3 and Mistral, and the rotary settings that other families share with them."""

from tests.quant.families import Case

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}


def old_spelling(config: dict) -> dict:
    """Return the config with rope_theta and rope_scaling, as before transformers 5."""
    settings = config.pop("rope_parameters")
    theta = settings.pop("rope_theta")
    return config | {"rope_theta": theta, "rope_scaling": settings}


CASES = [
    Case("llama, untied", "LlamaForCausalLM"),
    Case(
        "llama, tied, 4 query heads per key head",
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    Case("llama, biases", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Case("llama 3 rope", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    Case(
        "llama 3 rope, old spelling",
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3},
        config=old_spelling,
    ),
    Case(
        "linear rope",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    Case("yarn rope", "LlamaForCausalLM", {"rope_parameters": YARN}),
    Case(
        "yarn rope, explicit attention factor",
        "LlamaForCausalLM",
        {"rope_parameters": YARN | {"attention_factor": 1.3}},
    ),
    Case(
        "yarn rope, two mscales, old spelling",
        "LlamaForCausalLM",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4}},
        config=old_spelling,
    ),
    Case("mistral", "MistralForCausalLM", {"sliding_window": None}),
]
