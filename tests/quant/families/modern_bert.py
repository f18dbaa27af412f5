"""ModernBERT: encoders with windows, and rerankers that pool in two ways."""

from typing import Any

from tests.quant.families import Case

ENCODER = {
    "num_key_value_heads": None,
    "head_dim": None,
    "num_hidden_layers": 4,
    "local_attention": 64,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config as in the first checkpoints, with other rotary bases than by default."""
    del values["rope_parameters"], values["layer_types"]
    bases = {"global_rope_theta": 50000.0, "local_rope_theta": 7000.0}
    return values | bases | {"global_attn_every_n_layers": 3}


CASES = [
    Case("modern-bert", "ModernBertModel", ENCODER, output="vectors"),
    Case(
        "modern-bert, masked language model, old spelling",
        "ModernBertForMaskedLM",
        ENCODER,
        config=old_spelling,
        output="vectors",
    ),
    Case(
        "modern-bert, other layers, silu",
        "ModernBertModel",
        ENCODER
        | {
            "hidden_activation": "silu",
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "full_attention",
                "sliding_attention",
            ],
        },
        output="vectors",
    ),
    Case(
        "modern-bert, reranker",
        "ModernBertForSequenceClassification",
        ENCODER | {"num_labels": 1},
        config=lambda values: values | {"label2id": {"LABEL_0": 0}},
        output="scores",
    ),
    Case(
        "modern-bert, mean of vectors, two scores",
        "ModernBertForSequenceClassification",
        ENCODER | {"classifier_pooling": "mean"},
        output="scores",
    ),
]
