"""BERT and XLM-RoBERTa: encoders, and rerankers with one or more scores."""

from typing import Any

from tests.quant.families import Case

ENCODER = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
}


def reranker(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config with labels as in older versions, which always wrote them."""
    return values | {"label2id": {"LABEL_0": 0}}


CASES = [
    Case("bert", "BertModel", ENCODER | {"pad_token_id": 0}, output="vectors"),
    Case(
        "bert, masked language model, one type",
        "BertForMaskedLM",
        ENCODER | {"pad_token_id": 0, "type_vocab_size": 1},
        output="vectors",
    ),
    Case(
        "bert, reranker",
        "BertForSequenceClassification",
        ENCODER | {"pad_token_id": 0, "num_labels": 1},
        config=reranker,
        output="scores",
    ),
    Case(
        "bert, three scores",
        "BertForSequenceClassification",
        ENCODER | {"pad_token_id": 0, "num_labels": 3},
        output="scores",
    ),
    Case(
        "xlm-roberta",
        "XLMRobertaModel",
        ENCODER | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 514},
        output="vectors",
    ),
    Case(
        "xlm-roberta, masked language model",
        "XLMRobertaForMaskedLM",
        ENCODER | {"pad_token_id": 1},
        output="vectors",
    ),
    Case(
        "xlm-roberta, reranker",
        "XLMRobertaForSequenceClassification",
        ENCODER | {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1},
        output="scores",
    ),
]
