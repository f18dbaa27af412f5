"""Vectors and scores of converted encoders, from texts, compared with transformers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from llmcli.runtime.scoring.embedder import normalize
from quant.convert import checkpoint_source
from quant.convert.parts.base import POOLING_FILE
from quant.quantize import plan, write
from tests.quant import families
from tests.quant.families.bert import ENCODER
from tests.quant.tokenizer import test_wordpiece
from tests.runtime.scoring.test_embedder import embed, open_embedding_runner

TEXTS = ["Hello, world! How are you?", "The quick brown fox.", "state-of-the-art naïve Café"]


def build(folder: Path, hf: str, **settings: Any) -> Path:
    """Write a small checkpoint with a WordPiece tokenizer."""
    size = test_wordpiece.write_tokenizer(folder.parent / "tokenizer", {})
    values = ENCODER | {"pad_token_id": 0, "vocab_size": size} | settings
    families.build(families.Case("encoder", hf, values), folder)
    for file in (*folder.glob("tokenizer*"), *folder.glob("special_tokens*")):
        file.unlink()
    for file in (folder.parent / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def convert(folder: Path) -> Path:
    """Convert a checkpoint to F32."""
    out = folder.with_suffix(".gguf")
    write.write_model(plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out)
    return out


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_of_texts_equal_those_of_transformers(pooling: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "BertModel")
    (folder / "1_Pooling").mkdir()
    (folder / POOLING_FILE).write_text(f'{{"pooling_mode": "{pooling}"}}')
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open_embedding_runner(convert(folder)) as runner:
        embedder = runner.embedder()
        assert embedder.pooling == pooling
        ids = [embedder.encode(text) for text in TEXTS]
        assert ids == [oracle.encode(text).ids for text in TEXTS]
        vectors, _ = embed(embedder, ids)
    for tokens, vector in zip(ids, vectors, strict=True):
        hidden = families.theirs(folder, tokens, "vectors")
        expected = normalize(hidden.mean(0) if pooling == "mean" else hidden[0])
        assert 1 - vector @ expected < 1e-5


def test_scores_of_pairs_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = build(
        tmp_path / "model",
        "BertForSequenceClassification",
        num_labels=1,
        type_vocab_size=1,
        label2id={"LABEL_0": 0},
    )
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open_embedding_runner(convert(folder)) as runner:
        embedder = runner.embedder()
        assert embedder.is_reranker
        ids = [embedder.encode_pair(TEXTS[0], text) for text in TEXTS[1:]]
        assert ids == [oracle.encode(TEXTS[0], text).ids for text in TEXTS[1:]]
        scores, _ = embed(embedder, ids)
    expected = [families.theirs(folder, tokens, "scores")[0] for tokens in ids]
    # llama.cpp reads GELU from a table of f16 values.
    np.testing.assert_allclose(scores, expected, atol=5e-3)
