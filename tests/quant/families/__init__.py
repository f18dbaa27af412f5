"""Tiny random checkpoints of every family, and both sides' logits: transformers is the oracle.

One file a family, exporting CASES: a model class of transformers and the settings that make its
graph. Weights are scaled, norms not 1 and biases not 0, so that a wrong row, norm or bias shows;
320 positions, so that rotary settings and sliding windows show.
"""

import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STORIES = Path(__file__).parents[2] / "data" / "stories260K"
TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 500, 320)]
# What a config of any family gets unless its case says otherwise: grouped queries, heads wider than
# hidden / heads.
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """One graph of a family: `hf` is a class of transformers; settings of None take a default of
    TINY out.

    `norm` is the mean of the norms' weights (0 where 1 is added to them), `scale` the deviation of
    the matrices'; `change` edits the finished model; `config` edits config.json after saving (older
    spellings); `original` saves tensors as the family's first checkpoints had them (experts apart),
    otherwise as transformers 5 keeps them.
    """

    name: str
    hf: str
    settings: dict[str, Any] = field(default_factory=dict)
    norm: float = 1.0
    scale: float = 0.08
    change: Callable[[Any], None] | None = None
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    original: bool = True
    limit: float = 1e-6


def settings(case: Case) -> dict[str, Any]:
    """What the case's config says, before transformers adds its own."""
    return {
        key: value
        for key, value in (TINY | case.settings).items()
        if value is not None or key not in TINY
    }


def cases() -> list[Case]:
    """Every family's cases."""
    found: list[Case] = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        found += importlib.import_module(f"{__name__}.{info.name}").CASES
    return found


def build(case: Case, folder: Path) -> Path:
    """Write the case's checkpoint, with the stories' tokenizer."""
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: transformers computes nothing"
    )
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, case.hf)
    config = kind.config_class(**settings(case))
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name and value.dim() == 1:
                value.normal_(case.norm, 0.2)
            else:
                value.normal_(0, case.scale if value.dim() > 1 else 0.1)
        if case.change:
            case.change(model)
    model.save_pretrained(folder, save_original_format=case.original)
    for file in STORIES.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, folder)
    if case.config:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(case.config(values)))
    return folder


def theirs(folder: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    """transformers' logits in float32 [tokens, vocabulary]."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def ours(path: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    """llama.cpp's logits, flash attention off [tokens, vocabulary]."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=2, n_threads_batch=2, logits_all=True,
        flash_attn=False, verbose=False, type_k=0, type_v=0,
        yarn_attn_factor=-1.0, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,  # as the file says
    )  # fmt: skip
    model.eval(tokens)
    scores = np.array(model.scores[: len(tokens)])
    model.close()
    return scores


def nmse(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Normalised mean squared error."""
    return float(((ours - theirs) ** 2).sum() / (theirs**2).sum())


def agreement(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int]:
    """Positions where the reference's first leads its second by more than 1e-4, and those of them
    with our first.
    """
    best = np.sort(theirs, axis=-1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 1e-4
    return int((ours.argmax(-1) == theirs.argmax(-1))[clear].sum()), int(clear.sum())
