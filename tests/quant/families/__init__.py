"""Tiny random checkpoints of every family, with their logits in llama.cpp and in transformers.

Each module of this package has one family, and its CASES are classes of transformers with
settings. Weights are scaled, norms differ from 1 and biases from 0, so that a wrong row, norm or
bias changes the logits. The 320 tokens make rotary settings and sliding windows matter.
"""

import importlib
import json
import pkgutil
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STORIES = Path(__file__).parents[2] / "data" / "stories260K"
TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 500, 320)]
# The default settings of all families: grouped queries, and heads wider than hidden_size / heads.
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
    """One tiny model of a family.

    `hf` is its class in transformers. `settings` replace those of TINY, and a setting of None
    removes the one of TINY. `norm` is the mean of the norm weights (0 if the graph adds 1), and
    `scale` the standard deviation of the matrices. `change` edits the model in place. `config`
    edits the config.json after saving, for older spellings. `output` is what is compared: "logits",
    "vectors" of the tokens (encoders) or "scores" of the text (rerankers). `original` saves the tensors as in the
    first checkpoints of the family (separate experts), otherwise as in transformers 5. `limit` is
    the largest allowed normalized mean squared error of the logits. `built` is the class that is
    built instead of `hf`, if transformers cannot build that one without further libraries. `names`
    replaces regular expressions in the names of saved tensors, as released checkpoints have them.
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
    built: str = ""
    output: str = "logits"
    names: dict[str, str] = field(default_factory=dict)


def settings(case: Case) -> dict[str, Any]:
    """Return the config settings of a case, without the defaults of transformers."""
    return {
        key: value
        for key, value in (TINY | case.settings).items()
        if value is not None or key not in TINY
    }


def cases() -> list[Case]:
    """Return the cases of all families."""
    result: list[Case] = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        result += importlib.import_module(f"{__name__}.{info.name}").CASES
    return result


def build(case: Case, folder: Path) -> Path:
    """Write the checkpoint of a case, with the stories260K tokenizer, and return `folder`."""
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: transformers computes nothing"
    )
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, case.built or case.hf)
    config = model_class.config_class(**settings(case))
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name.lower() and value.dim() == 1:
                value.normal_(case.norm, 0.2)
            else:
                value.normal_(0, case.scale if value.dim() > 1 else 0.1)
        if case.change:
            case.change(model)
    model.save_pretrained(folder, save_original_format=case.original)
    rename_tensors(folder, case.names)
    copy_tokenizer(STORIES, folder)
    if case.config:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(case.config(values)))
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer from one folder to another."""
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges")):
            shutil.copyfile(file, folder / file.name)


def token_count(folder: Path) -> int:
    """Return the number of tokens of the tokenizer in a folder."""
    document = json.loads((folder / "tokenizer.json").read_text())
    ids = [
        *document["model"]["vocab"].values(),
        *(token["id"] for token in document["added_tokens"]),
    ]
    return max(ids) + 1


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    """Replace the first match of each regular expression in the tensors' names of a checkpoint."""
    if not names:
        return
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for pattern, new in names.items():
            name = re.sub(pattern, new, name, count=1)
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def theirs(folder: Path, tokens: list[int] = TOKENS, output: str = "logits") -> np.ndarray:
    """Return the float32 logits of transformers, of shape [tokens, vocabulary]; for another
    `output` the vectors of an encoder [tokens, hidden] or the scores of a reranker [1, labels].
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    auto_class = {
        "logits": transformers.AutoModelForCausalLM,
        "vectors": transformers.AutoModel,
        "scores": transformers.AutoModelForSequenceClassification,
    }[output]
    for other in (
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForSeq2SeqLM,  # those with audio or an encoder
    ):
        if output == "logits" and type(config) not in auto_class._model_mapping:
            auto_class = other
    if config.architectures[0].endswith("EncoderModel"):  # a half of a model
        auto_class = transformers.AutoModelForTextEncoding
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    inputs = {"input_ids": torch.tensor([tokens])}
    if config.is_encoder_decoder and output == "logits":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        result = model(**inputs)
    if output == "scores":
        return result.logits.numpy()
    return (result.logits if output == "logits" else result.last_hidden_state)[0].numpy()


def ours(path: Path, tokens: list[int] = TOKENS, output: str = "logits") -> np.ndarray:
    """Return what llama.cpp computes without flash attention, in the shapes of theirs()."""
    import llama_cpp

    pooling = {
        "logits": llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED,
        "vectors": llama_cpp.LLAMA_POOLING_TYPE_NONE,
        "scores": llama_cpp.LLAMA_POOLING_TYPE_RANK,
    }[output]
    model = llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, n_threads_batch=1,
        logits_all=True, flash_attn=False, verbose=False, type_k=0, type_v=0,
        embedding=output != "logits", pooling_type=pooling,
        yarn_attn_factor=-1.0, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,  # as the file says
    )  # fmt: skip
    if output != "logits" or llama_cpp.llama_model_has_encoder(model.model):
        model._batch.set_batch(tokens, n_past=0, logits_all=True)
        assert llama_cpp.llama_encode(model.ctx, model._batch.batch) == 0
    if output == "logits":
        model.eval(tokens)
        scores = np.array(model.scores[: len(tokens)])
    else:
        scores = _encoded(model, len(tokens), output)
    model.close()
    return scores


def _encoded(model: Any, tokens: int, output: str) -> np.ndarray:
    """Return the vectors of `tokens` encoded tokens, or the scores of their text."""
    import llama_cpp

    if output == "scores":
        count = llama_cpp.llama_model_n_cls_out(model.model)
        values = llama_cpp.llama_get_embeddings_seq(model.ctx, 0)
        return np.array([values[:count]], np.float32)
    width = llama_cpp.llama_model_n_embd(model.model)
    rows = [llama_cpp.llama_get_embeddings_ith(model.ctx, i)[:width] for i in range(tokens)]
    return np.array(rows, np.float32)


def nmse(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the squared error of `ours`, divided by the sum of squares of `theirs`."""
    return float(((ours - theirs) ** 2).sum() / (theirs**2).sum())


def agreement(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int]:
    """Compare the most probable tokens where the reference has a lead of more than 1e-4.

    Returns the number of these positions where our token is the same, and their total number.
    """
    best = np.sort(theirs, axis=-1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 1e-4
    return int((ours.argmax(-1) == theirs.argmax(-1))[clear].sum()), int(clear.sum())
