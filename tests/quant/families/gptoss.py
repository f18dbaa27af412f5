"""gpt-oss with experts in floats. checkpoint/quantized/test_mxfp4.py tests experts in MXFP4."""

from tests.quant.families import Case

HF = "GptOssForCausalLM"
ROPE = {"rope_type": "default", "rope_theta": 150000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": True,
}
PLAIN = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 128,
    "sliding_window": 48,
    "num_hidden_layers": 3,
    "rope_parameters": ROPE,
}


def old_spelling(config: dict) -> dict:
    """Return the config with rope_theta, rope_scaling and experts_per_token, and without
    layer_types, as in the first checkpoints.
    """
    settings = config.pop("rope_parameters")
    theta = settings.pop("rope_theta")
    del config["layer_types"]
    return config | {"rope_theta": theta, "rope_scaling": settings, "experts_per_token": 3}


CASES = [
    Case("gpt-oss", HF, PLAIN),
    Case("gpt-oss, yarn", HF, PLAIN | {"rope_parameters": YARN, "num_key_value_heads": 2}),
    Case("gpt-oss, yarn, old spelling", HF, PLAIN | {"rope_parameters": YARN}, config=old_spelling),
    Case(
        "gpt-oss, yarn, attention factor",
        HF,
        PLAIN | {"rope_parameters": YARN | {"attention_factor": 1.2}},
    ),
    Case("gpt-oss, tied", HF, PLAIN | {"tie_word_embeddings": True}),
    Case(
        "gpt-oss, linear rope",
        HF,
        PLAIN | {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    ),
    Case(
        "gpt-oss, other sliding layers",
        HF,
        PLAIN | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
]
