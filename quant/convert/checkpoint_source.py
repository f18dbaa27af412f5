"""Converts a Hugging Face checkpoint folder to a Source: config, vocabulary, and tensors under
their GGUF names.

Every tensor of the checkpoint is converted or deliberately dropped; all tensors that do not fit are
reported in one error.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.checkpoint import dequantize, model_card, safetensors, tensor_views
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.language_part import extract_language_part
from quant.checkpoint.pickles import find_pickles, load_pickles, pickles_not_allowed
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert import general_metadata
from quant.convert.archs import ARCHS
from quant.convert.archs.base import Arch, ArchKey
from quant.errors import UserError, list_first
from quant.gguf.header import DEFAULT_ALIGNMENT_BYTES
from quant.gguf.layout import encode_entry
from quant.model_file.model_header import tensor_role
from quant.native import ggml
from quant.recipes import tensor_types
from quant.recipes.file_types import ModelFacts
from quant.source.blob import Blob
from quant.source.source import Source, Weight
from quant.tokenizer.vocabulary import load_vocabulary

if TYPE_CHECKING:
    from quant.native.ggml import F32

# Most misfits that one error lists: more than any real checkpoint has, but a limit for hostile
# ones.
MAX_LISTED_MISFITS = 2000
HEAD_NAME, EMBEDDING_NAME = tensor_types.HEAD_NAME, tensor_types.EMBEDDING_NAMES[0]
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
# Roles of matrices that stay F32: routers are small and sensitive to rounding.
F32_ROLES = ("ffn_gate_inp", "ffn_gate_inp_shexp")


def open_checkpoint(
    path: Path,
    *,
    tokenizer: Path | None = None,
    pre: str | None = None,
    allow_pickle: bool = False,
    blobs: Mapping[str, Blob] | None = None,
) -> Source:
    """Open a checkpoint folder with config.json, weights and a tokenizer as a Source.

    `tokenizer` is another folder to read the tokenizer from. `pre` overrides the name of the
    pre-tokenizer. `allow_pickle` permits pickled weights if there are no safetensors. `blobs` are
    the safetensors files by name if they are not in the folder. Raises UserError for anything that
    cannot be converted.
    """
    folder = CheckpointFolder(path)
    arch, config = read_family(folder)
    notes = arch.check(config)
    blobs = safetensors.find_safetensors(path) if blobs is None else blobs
    stored = _stored(folder, blobs, allow_pickle)
    language_part = extract_language_part(path, stored)
    restored = dequantize.restore_floats(folder, config, language_part.tensors)
    vocabulary = load_vocabulary(
        _tokenizer_folder(folder, tokenizer, config),
        config,
        pre,
        size_from_tokenizer=arch.vocab_size_from_tokenizer,
    )
    config = CheckpointConfig({**config.values, "vocab_size": vocabulary.size}, config.location)
    weights, dropped_notes = _convert_weights(path, arch, config, restored.tensors)
    keys = arch.keys(config)
    dtype = _dtype(language_part.tensors)
    entries = [
        *general_metadata.general_entries(folder, arch.name, weights, restored.method),
        *((f"{arch.name}.{key.name}", encode_entry(key.kind, key.value)) for key in keys),
        *general_metadata.type_entries(dtype),
    ]
    facts = _facts(arch, keys)
    files = tuple(sorted({tensor.file for tensor in stored.values()}))
    return Source(
        path,
        files,
        general_metadata.find_origin(path).name,
        facts,
        (*entries, *vocabulary.entries),
        tuple(weights),
        DEFAULT_ALIGNMENT_BYTES,
        (*language_part.notes, *restored.notes, *dropped_notes, *notes, *vocabulary.notes),
        dtype=dtype,
        blobs=tuple(blobs[file.name] for file in files if file.name in blobs),
    )


def _stored(folder: CheckpointFolder, blobs: Mapping[str, Blob], allow_pickle: bool) -> Tensors:
    """Return the checkpoint's tensors as they are stored.

    Safetensors are preferred; pickles are read only with `allow_pickle`.
    """
    if any(name.startswith("model") for name in blobs) or not (
        pickles := find_pickles(folder.path)
    ):
        return safetensors.load_tensors(folder, blobs)
    if not allow_pickle:
        raise pickles_not_allowed(folder.path, [file.name for file in pickles])
    return load_pickles(folder)


def _tokenizer_folder(
    checkpoint: CheckpointFolder, override: Path | None, config: CheckpointConfig
) -> CheckpointFolder:
    """Return the folder to read the tokenizer from: `override` if it is given, else the
    checkpoint's.

    Raises UserError if that folder has no tokenizer; the error names the parent model, whose
    tokenizer fits.
    """
    if override is not None and not override.is_dir():
        raise UserError(
            f"there is no folder {override}", hint="--tokenizer names a folder with tokenizer files"
        )
    folder = CheckpointFolder(override) if override else checkpoint
    if not any(map(folder.has_file, TOKENIZER_FILES)):
        parent = model_card.find_parent(checkpoint.path, config.values)
        owner = f"{parent}, the model it was made from" if parent else "the model it was made from"
        raise UserError(
            f"{folder.path} has no tokenizer: neither {' nor '.join(TOKENIZER_FILES)}",
            hint=f"add --tokenizer FOLDER with the tokenizer files of {owner}",
        )
    return folder


def _dtype(stored: Tensors) -> str:
    """Return the dtype of the checkpoint's first float matrix. It is not read from torch_dtype in
    config.json, which can be wrong.
    """
    return next(
        (
            t.dtype
            for t in stored.values()
            if len(t.shape) > 1 and t.dtype in safetensors.FLOAT_DTYPES
        ),
        "BF16",
    )


def _facts(arch: Arch, keys: list[ArchKey]) -> ModelFacts:
    """Return the properties of the model that the type recipes need, read from its metadata keys."""
    numbers = {key.name: key.value for key in keys if isinstance(key.value, int)}
    heads = numbers["attention.head_count"]
    return ModelFacts(
        architecture=arch.name,
        layers=numbers["block_count"],
        heads=heads,
        kv_heads=numbers.get("attention.head_count_kv", heads),
        experts=numbers.get("expert_count", 0),
    )


def read_family(folder: CheckpointFolder) -> tuple[Arch, CheckpointConfig]:
    """Return the model family of a checkpoint folder, and its config.

    The config has the text model's settings at the root, and the family's defaults for settings
    that config.json omits. Raises UserError for families that are not supported.
    """
    config = _config(folder)
    arch = _arch(folder.path, config)
    return arch, CheckpointConfig({**arch.defaults, **config.values}, config.location)


def _config(folder: CheckpointFolder) -> CheckpointConfig:
    path = folder.path
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", hint="check the path")
    if not folder.has_file("config.json"):
        raise UserError(
            f"{path} has no config.json", hint="name a checkpoint folder, or a .gguf file"
        )
    values = folder.read_json("config.json")
    if isinstance(text := values.get("text_config"), dict):
        # the class of the whole model takes precedence over that of its text part
        classes = [*_classes(values), *_classes(text)]
        classes.sort(key=lambda name: name not in ARCHS)
        values = values | text | {"architectures": classes, "model_type": values.get("model_type")}
    return CheckpointConfig(values, str(path / "config.json"))


def _classes(values: Mapping[str, Any]) -> list[str]:
    named = values.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _class_of_type(kind: object) -> list[str]:
    """Return the class name that transformers uses for a model_type, in a list; this is for configs
    that do not name a class.

    Example: "qwen2_moe" -> Qwen2MoeForCausalLM.
    """
    plain = str(kind).removesuffix("_text").replace("_", "")
    return [name for name in ARCHS if name.lower() == f"{plain}forcausallm"]


def _arch(path: Path, config: CheckpointConfig) -> Arch:
    named = _classes(config.values) or _class_of_type(config.values.get("model_type"))
    name = named[0] if named else "unknown"
    if name not in ARCHS:
        nearest = difflib.get_close_matches(name, ARCHS, n=1)
        like = f"; the nearest is {nearest[0]}" if nearest else ""
        raise UserError(
            f"{path} is a {name}; supported are {', '.join(sorted(ARCHS))}{like}",
            hint="pull a GGUF of this model instead",
        )
    return ARCHS[name]


def _convert_weights(
    path: Path, arch: Arch, config: CheckpointConfig, stored: Tensors
) -> tuple[list[Weight], list[str]]:
    """Return every tensor under its GGUF name, in llama.cpp's order, and notes for the user.

    Raises one UserError that lists all tensors that do not fit.
    """
    shapes = _FamilyShapes(arch.required_shapes(config), arch.optional_shapes(config))
    named = _name_tensors(arch, config, stored)
    placed = _drop_surplus(path, named, shapes)
    _check_placement(path, placed, shapes)
    weights = _transform(arch, config, placed.tensors)
    zero_biases = len(named.tensors.keys() - placed.tensors.keys() - {HEAD_NAME})
    notes = [
        f"{zero_biases} biases are left out: this family has none, and they are all zero"
    ] * bool(zero_biases)
    return weights, notes


@dataclass(frozen=True, slots=True)
class _FamilyShapes:
    """The shapes of a family's required and optional tensors, by GGUF name."""

    required: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]

    @property
    def allowed(self) -> dict[str, tuple[int, ...]]:
        return self.optional | self.required


@dataclass(frozen=True, slots=True)
class _NamedTensors:
    """A checkpoint's tensors by GGUF name, and the tensors without a GGUF name in this family
    (`unknown`).
    """

    tensors: Tensors
    unknown: tuple[LazyTensor, ...]


def _name_tensors(arch: Arch, config: CheckpointConfig, stored: Tensors) -> _NamedTensors:
    import gguf

    used = {name: item for name, item in stored.items() if not name.endswith(arch.dropped_endings)}
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[arch.kind], config.get_int("num_hidden_layers")
    )
    placed: Tensors = {}
    unknown = []
    for key, tensor in arch.prepare(config, used).items():
        name = _family_name(arch, key) or names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None or name in placed:
            unknown.append(tensor)
        else:
            placed[name] = tensor
    return _NamedTensors(placed, tuple(unknown))


def _drop_surplus(path: Path, named: _NamedTensors, shapes: _FamilyShapes) -> _NamedTensors:
    """Return the tensors without a head that is tied to the embedding, and without biases of zeros
    that the family does not have.
    """
    allowed, tensors = shapes.allowed, dict(named.tensors)
    if HEAD_NAME in tensors and HEAD_NAME not in allowed:
        _check_tied_head(path, tensors.pop(HEAD_NAME), tensors.get(EMBEDDING_NAME))
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name in allowed or not _is_zero_bias(name, tensor)
    }
    return _NamedTensors(kept, named.unknown)


def _check_placement(path: Path, placed: _NamedTensors, shapes: _FamilyShapes) -> None:
    """Raise one UserError that lists all tensors that do not fit the config, if there are any."""
    tensors, allowed = placed.tensors, shapes.allowed
    misfits = [f"{tensor.name} is unknown" for tensor in placed.unknown]
    misfits += [
        f"{tensor.name} ({name}) does not belong to this family"
        for name, tensor in tensors.items()
        if name not in allowed
    ]
    misfits += [f"{name} is missing" for name in shapes.required if name not in tensors]
    misfits += [
        f"{tensors[name].name} is {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in allowed.items()
        if name in tensors and tensors[name].shape != shape
    ]
    misfits += [
        f"{tensor.name} is stored as {tensor.dtype}"
        for tensor in tensors.values()
        if not _is_readable_dtype(tensor.dtype)
    ]
    if misfits:
        raise UserError(
            f"{path}: {len(misfits)} tensors do not fit its config.json: "
            f"{list_first(misfits, MAX_LISTED_MISFITS)}",
            hint="fetch the whole model again",
        )


def _is_readable_dtype(dtype: str) -> bool:
    is_quantized = dtype in ggml.TYPE_NUMBERS and ggml.is_quantized(dtype)
    return is_quantized or dtype in safetensors.FLOAT_DTYPES


def _transform(arch: Arch, config: CheckpointConfig, tensors: Tensors) -> list[Weight]:
    """Return the tensors as llama.cpp stores them, including computed ones, in llama.cpp's order."""
    if arch.needs_head and HEAD_NAME not in tensors:
        tensors = {**tensors, HEAD_NAME: tensors[EMBEDDING_NAME]}
    weights = [
        _computed_weight(name, values) for name, values in arch.extra_tensors(config).items()
    ]
    for name, tensor in tensors.items():
        op = arch.ops.get(tensor_role(name))
        weights.append(_weight(name, op(config, tensor) if op else tensor))
    return sorted(weights, key=lambda weight: tensor_types.tensor_order(weight.name))


def _is_zero_bias(name: str, tensor: LazyTensor) -> bool:
    """Return whether a tensor is a bias of zeros, which some quantization tools add in families
    that have no biases.
    """
    vector = (
        name.endswith(".bias")
        and len(tensor.shape) == 1
        and tensor.dtype in safetensors.FLOAT_DTYPES
    )
    return vector and not tensor_views.read_floats(tensor).any()


def _family_name(arch: Arch, name: str) -> str | None:
    """Return the GGUF name that the family itself assigns, or None.

    Example: "model.layers.3.mlp.router.weight" -> "blk.3.ffn_gate_inp.weight".
    """
    match = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if match and match[2] in arch.names:
        return f"blk.{match[1]}.{arch.names[match[2]]}{match[3] or '.weight'}"
    return None


def _check_tied_head(path: Path, head: LazyTensor, embedding: LazyTensor | None) -> None:
    """Raise UserError if the head of a model that ties it to the embedding is not a copy of the
    embedding.
    """
    rows = range(0, head.shape[0], max(1, head.shape[0] // 256))
    if (
        embedding is None
        or (head.shape, head.dtype) != (embedding.shape, embedding.dtype)
        or any((head.read(row, row + 1) != embedding.read(row, row + 1)).any() for row in rows)
    ):
        raise UserError(
            f"{path}: config.json ties the head to the embedding, but {head.name} is different",
            hint='to use this head, set "tie_word_embeddings": false in config.json',
        )


def _weight(name: str, tensor: LazyTensor) -> Weight:
    """Return a tensor as a Weight: matrices in their dtype; norms, biases, routers and other
    vectors as F32, which llama.cpp expects.
    """
    shape = tuple(reversed(tensor.shape))
    if len(shape) > 1 and name.endswith(".weight") and tensor_role(name) not in F32_ROLES:
        return Weight(name, shape, tensor.dtype, tensor.read)
    return Weight(name, shape, "F32", tensor_views.map_values(tensor, lambda values: values).read)


def _computed_weight(name: str, values: "F32") -> Weight:
    """Return a computed vector as a Weight."""
    import numpy as np

    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(1, -1)
    return Weight(name, (values.size,), "F32", lambda first, last: data[first:last])
