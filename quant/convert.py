"""The road from a checkpoint folder of Hugging Face to a Source: config, vocabulary, placed
tensors.

Every tensor is placed, made or dropped, or all that is wrong is told at once. It knows no
architecture (archs) and no tokenizer (vocab), only how they meet.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant import (
    card,
    dequantize,
    language,
    metadata,
    native,
    pickled,
    recipe,
    tensors,
    views,
    vocab,
)
from quant.archs import ARCHS
from quant.archs.base import Arch, Config, Key, Tensors
from quant.blob import Blob
from quant.container import role
from quant.errors import Refusal
from quant.header import ALIGNMENT
from quant.recipe import Facts
from quant.source import Source, Weight
from quant.tensors import LazyTensor
from quant.writer import entry

if TYPE_CHECKING:
    from quant.native import F32

TOLD = (
    2000  # misfits that are listed: all of any real checkpoint's, and not a hostile one's million
)
TOKENIZERS = ("tokenizer.model", "tokenizer.json")
FULL = (
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
)  # matrices that stay F32: routers are small and delicate


def open_folder(
    path: Path,
    *,
    tokenizer: Path | None = None,
    pre: str | None = None,
    allow_pickle: bool = False,
    blobs: Mapping[str, Blob] | None = None,
) -> Source:
    """Take a folder with config.json, safetensors and a tokenizer as a source.

    `tokenizer` is another folder to take the tokenizer from, `pre` the name of its pre-tokenizer;
    `allow_pickle` reads pickled weights where there are no safetensors; `blobs` are the safetensors
    by name where they lie elsewhere.
    """
    arch, config = family(path)
    notes = arch.check(config)
    blobs = tensors.files(path) if blobs is None else blobs
    stored = _stored(path, blobs, allow_pickle)
    spoken = language.part(path, stored)
    restored = dequantize.restore(path, config, spoken.tensors)
    words = vocab.load(_tokenizer(path, tokenizer, config), config, pre, spare=arch.spare)
    config = Config({**config.values, "vocab_size": words.size}, config.where)
    weights, idle = _weights(path, arch, config, restored.tensors)
    keys = arch.keys(config)
    dtype = _dtype(spoken.tensors)
    entries = [
        *metadata.general(path, arch.name, weights, restored.method),
        *((f"{arch.name}.{key.name}", entry(key.kind, key.value)) for key in keys),
        *metadata.types(dtype),
    ]
    facts = _facts(arch, keys)
    files = tuple(sorted({tensor.file for tensor in stored.values()}))
    return Source(
        path,
        files,
        metadata.origin(path).name,
        facts,
        (*entries, *words.entries),
        tuple(weights),
        ALIGNMENT,
        (*spoken.notes, *restored.notes, *idle, *notes, *words.notes),
        dtype=dtype,
        blobs=tuple(blobs[file.name] for file in files if file.name in blobs),
    )


def _stored(path: Path, blobs: Mapping[str, Blob], allow_pickle: bool) -> Tensors:
    """The checkpoint's tensors as they are stored; safetensors go before pickles, which must be
    allowed.
    """
    if any(name.startswith("model") for name in blobs) or not (pickles := pickled.files(path)):
        return tensors.load(path, blobs)
    if not allow_pickle:
        raise pickled.unasked(path, [file.name for file in pickles])
    return pickled.load(path)


def _tokenizer(path: Path, other: Path | None, config: Config) -> Path:
    """The folder to read the tokenizer from; a finetune without one is told whose it may take."""
    if other is not None and not other.is_dir():
        raise Refusal(
            f"there is no folder {other}", hint="--tokenizer names a folder with tokenizer files"
        )
    folder = other or path
    if not any((folder / name).is_file() for name in TOKENIZERS):
        parent = card.parent(path, config.values)
        whose = f"{parent}, the model it was made from" if parent else "the model it was made from"
        raise Refusal(
            f"{folder} has no tokenizer: neither {' nor '.join(TOKENIZERS)}",
            hint=f"add --tokenizer FOLDER with the tokenizer files of {whose}",
        )
    return folder


def _dtype(stored: Tensors) -> str:
    """What the checkpoint's floats are: the type of its first matrix of floats (torch_dtype may
    lie).
    """
    return next(
        (t.dtype for t in stored.values() if len(t.shape) > 1 and t.dtype in tensors.FLOATS), "BF16"
    )


def _facts(arch: Arch, keys: list[Key]) -> Facts:
    """What the recipes ask, read off the keys as from a finished file."""
    numbers = {key.name: key.value for key in keys if isinstance(key.value, int)}
    heads = numbers["attention.head_count"]
    return Facts(
        architecture=arch.name,
        layers=numbers["block_count"],
        heads=heads,
        kv_heads=numbers.get("attention.head_count_kv", heads),
        experts=numbers.get("expert_count", 0),
    )


def family(path: Path) -> tuple[Arch, Config]:
    """A folder's family, and its config: the text part at the root, what it does not say as the
    class has it.
    """
    config = _config(path)
    arch = _arch(path, config)
    return arch, Config({**arch.defaults, **config.values}, config.where)


def _config(path: Path) -> Config:
    if not path.is_dir():
        raise Refusal(f"there is no folder {path}", hint="check the path")
    file = path / "config.json"
    if not file.is_file():
        raise Refusal(
            f"{path} has no config.json", hint="name a checkpoint folder, or a .gguf file"
        )
    values = tensors.read_json(file)
    if isinstance(text := values.get("text_config"), dict):
        classes = [*_classes(values), *_classes(text)]  # the whole model's first, if it is known
        classes.sort(key=lambda name: name not in ARCHS)
        values = values | text | {"architectures": classes, "model_type": values.get("model_type")}
    return Config(values, str(file))


def _classes(values: Mapping[str, Any]) -> list[str]:
    named = values.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _of_type(kind: object) -> list[str]:
    """The class that transformers takes for a model_type where none is named: "qwen2_moe" ->
    Qwen2MoeForCausalLM.
    """
    plain = str(kind).removesuffix("_text").replace("_", "")
    return [name for name in ARCHS if name.lower() == f"{plain}forcausallm"]


def _arch(path: Path, config: Config) -> Arch:
    named = _classes(config.values) or _of_type(config.values.get("model_type"))
    name = named[0] if named else "unknown"
    if name not in ARCHS:
        near = difflib.get_close_matches(name, ARCHS, n=1)
        like = f"; the nearest is {near[0]}" if near else ""
        raise Refusal(
            f"{path} is a {name}; {', '.join(sorted(ARCHS))} are converted{like}",
            hint="pull a GGUF of this model instead",
        )
    return ARCHS[name]


def _weights(
    path: Path, arch: Arch, config: Config, stored: Tensors
) -> tuple[list[Weight], list[str]]:
    """Every tensor under its GGUF name, in llama.cpp's order, and notes; everything that does not
    fit, at once.
    """
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(arch.drop)}
    placed, strange = _place(arch, config, arch.prepare(config, kept))
    expected = arch.expected(config)
    known = arch.optional(config) | expected
    if "output.weight" in placed and "output.weight" not in known:
        _same_head(path, placed["output.weight"], placed.get("token_embd.weight"))
        del placed["output.weight"]
    idle = [name for name, tensor in placed.items() if name not in known and _zeros(name, tensor)]
    for name in idle:
        del placed[name]
    wrong = [f"{tensor.name} is unknown" for tensor in strange]
    wrong += [
        f"{tensor.name} ({name}) does not belong here"
        for name, tensor in placed.items()
        if name not in known
    ]
    wrong += [f"{name} is missing" for name in expected if name not in placed]
    wrong += [
        f"{placed[name].name} is {list(placed[name].shape)}, not {list(shape)}"
        for name, shape in known.items()
        if name in placed and placed[name].shape != shape
    ]
    wrong += [
        f"{tensor.name} is stored as {tensor.dtype}"
        for tensor in placed.values()
        if tensor.dtype not in tensors.FLOATS
        and not (tensor.dtype in native.TYPE_NUMBERS and native.quantized(tensor.dtype))
    ]
    if wrong:
        more = f"; and {len(wrong) - TOLD} more" if len(wrong) > TOLD else ""
        raise Refusal(
            f"{path}: {len(wrong)} tensors do not fit its config.json: {'; '.join(wrong[:TOLD])}{more}",
            hint="fetch the whole model again",
        )
    if arch.needs_head and "output.weight" not in placed:
        placed["output.weight"] = placed["token_embd.weight"]
    for name, tensor in placed.items():
        if op := arch.ops.get(role(name)):
            placed[name] = op(config, tensor)
    weights = [_weight(name, tensor) for name, tensor in placed.items()]
    weights += [_made(name, values) for name, values in arch.extra(config).items()]
    notes = [
        f"{len(idle)} biases that this family does not have are left out: they are zero"
    ] * bool(idle)
    return sorted(weights, key=lambda weight: recipe.order(weight.name)), notes


def _zeros(name: str, tensor: LazyTensor) -> bool:
    """Whether a tensor is a bias of zeros: quantizers leave them in families that have none."""
    vector = name.endswith(".bias") and len(tensor.shape) == 1 and tensor.dtype in tensors.FLOATS
    return vector and not views.floats(tensor).any()


def _place(arch: Arch, config: Config, tensors: Tensors) -> tuple[Tensors, list[LazyTensor]]:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.kind], config.number("num_hidden_layers"))
    placed: Tensors = {}
    strange = []
    for key, tensor in tensors.items():
        name = _named(arch, key) or names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None or name in placed:
            strange.append(tensor)
        else:
            placed[name] = tensor
    return placed, strange


def _named(arch: Arch, name: str) -> str | None:
    """The GGUF name that the family itself gives: "model.layers.3.mlp.router.weight" ->
    "blk.3.ffn_gate_inp.weight".
    """
    match = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if match and match[2] in arch.names:
        return f"blk.{match[1]}.{arch.names[match[2]]}{match[3] or '.weight'}"
    return None


def _same_head(path: Path, head: LazyTensor, embedding: LazyTensor | None) -> None:
    """A tied model may carry a copy of its embedding as the head, but no head of its own."""
    rows = range(0, head.shape[0], max(1, head.shape[0] // 256))
    if (
        embedding is None
        or (head.shape, head.dtype) != (embedding.shape, embedding.dtype)
        or any((head.read(row, row + 1) != embedding.read(row, row + 1)).any() for row in rows)
    ):
        raise Refusal(
            f"{path}: config.json ties the head to the embedding, but {head.name} is another tensor",
            hint='set "tie_word_embeddings": false in config.json if the head is meant',
        )


def _weight(name: str, tensor: LazyTensor) -> Weight:
    """Norms, biases, routers and all that is one-dimensional are kept as F32, as llama.cpp expects
    them.
    """
    shape = tuple(reversed(tensor.shape))
    if len(shape) > 1 and name.endswith(".weight") and role(name) not in FULL:
        return Weight(name, shape, tensor.dtype, tensor.read)
    return Weight(name, shape, "F32", views.mapped(tensor, lambda values: values).read)


def _made(name: str, values: "F32") -> Weight:
    """A one-dimensional tensor that was computed."""
    import numpy as np

    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(1, -1)
    return Weight(name, (values.size,), "F32", lambda first, last: data[first:last])
