"""Converts a Hugging Face checkpoint folder to a Source: its settings, its vocabulary, and its
tensors under their GGUF names.

Every tensor of the checkpoint is either converted or dropped for a known reason. All other tensors
are reported in one error.
"""

import difflib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.checkpoint import dequantize, model_card, safetensors, tensor_views
from quant.checkpoint.adapters import adapter_error
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.language_part import extract_language_part
from quant.checkpoint.pickles import find_pickles, load_pickles, pickles_not_allowed
from quant.checkpoint.safetensors import LazyTensor, Tensors
from quant.convert import general_metadata, gguf_tables
from quant.convert.archs import ARCHS
from quant.convert.parts import block_tensors, layout, prediction
from quant.convert.parts.base import POOLING_FILE, Arch, ArchKey
from quant.errors import UnknownClassError, UserError, list_first
from quant.gguf.header import DEFAULT_ALIGNMENT_BYTES
from quant.gguf.layout import encode_entry
from quant.model_file.model_header import tensor_role
from quant.native import ggml
from quant.recipes import tensor_types
from quant.recipes.file_types import ModelFacts
from quant.source.blob import Blob
from quant.source.source import Source, Weight
from quant.tokenizer.tokenizer_files import TOKENIZER_FILES
from quant.tokenizer.vocabulary import load_vocabulary

if TYPE_CHECKING:
    from quant.native.ggml import F32

# Maximum number of tensors that one error lists. No real checkpoint has more; a hostile one may.
MAX_LISTED_MISFITS = 2000
HEAD_NAME, EMBEDDING_NAME = tensor_types.HEAD_NAME, tensor_types.EMBEDDING_NAMES[0]
# Parts of tensor names that PyTorch adds where a model is compiled, sharded or checkpointed.
WRAPPER_PATTERN = re.compile(
    r"^module\.|(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Rows that are compared to see whether a prediction layer's embedding is a copy of the model's.
COMPARED_ROWS = 16
# model_type -> class name, where the letters of the two differ
CLASSES_OF_TYPES = {
    "gpt2": "GPT2LMHeadModel",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
}
# Threads that read small parts of a checkpoint at once, because it may be on a server.
READ_THREADS = 8
# Endings of the names of matrices that stay F32, as in prepare_tensors of llama.cpp's
# conversion/base.py: routers are small and sensitive to rounding, and ggml computes convolutions in
# F32 only.
F32_ENDINGS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "position_embd.weight",
    "token_types.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
    "altup_correct_coef.weight",
    "altup_predict_coef.weight",
    "indexer.proj.weight",
)


def open_checkpoint(
    path: Path,
    *,
    tokenizer: Path | None = None,
    pre: str | None = None,
    allow_pickle: bool = False,
    with_prediction: bool = True,
    blobs: Mapping[str, Blob] | None = None,
) -> Source:
    """Open a checkpoint folder with config.json, weights and a tokenizer as a Source. The weights
    are converted later, row by row, when they are read from the Source.

    `tokenizer` is another folder from which the tokenizer is read. `pre` overrides the name of the
    pre-tokenizer. `allow_pickle` permits pickled weights if there are no safetensors.
    `with_prediction` converts the layers that predict further tokens, too. `blobs` are the
    safetensors files by name, if they are not in the folder. Raises UserError for anything that
    cannot be converted.
    """
    folder = CheckpointFolder(path)
    arch, config = read_family(folder)
    notes = arch.check(config)
    blobs = safetensors.find_safetensors(path) if blobs is None else blobs
    stored, name_notes = _without_wrappers(_load_tensors(folder, blobs, allow_pickle))
    language_part = extract_language_part(path, stored)
    restored = dequantize.restore_floats(folder, config, language_part.tensors)
    vocabulary = load_vocabulary(
        _tokenizer_folder(folder, tokenizer, config),
        config,
        pre,
        size_from_tokenizer=arch.vocab_size_from_tokenizer,
    )
    config = CheckpointConfig({**config.values, "vocab_size": vocabulary.size}, config.location)
    tensors, config, prediction_notes = _choose_layers(
        arch, config, restored.tensors, with_prediction
    )
    weights, dropped_notes = _convert_weights(path, arch, config, tensors)
    keys = [
        *prediction.extend_keys(arch.keys(config), prediction.layer_count(config)),
        *arch.tensor_keys(config, tensors),
    ]
    dtype = _float_dtype(language_part.tensors)
    entries = [
        *general_metadata.general_entries(folder, arch.name, weights, restored.method),
        *((key.full_name(arch.name), encode_entry(key.kind, key.value)) for key in keys),
        *general_metadata.type_entries(dtype),
    ]
    facts = _model_facts(arch, keys)
    files = tuple(sorted({tensor.file for tensor in stored.values()}))
    return Source(
        path,
        files,
        general_metadata.find_origin(path).name,
        facts,
        (*entries, *vocabulary.entries),
        tuple(weights),
        DEFAULT_ALIGNMENT_BYTES,
        (
            *name_notes,
            *language_part.notes,
            *restored.notes,
            *prediction_notes,
            *dropped_notes,
            *notes,
            *vocabulary.notes,
        ),
        dtype=dtype,
        blobs=tuple(blobs[file.name] for file in files if file.name in blobs),
    )


def _load_tensors(
    folder: CheckpointFolder, blobs: Mapping[str, Blob], allow_pickle: bool
) -> Tensors:
    """Return the checkpoint's tensors as they are stored, by name.

    Safetensors take precedence over pickled weights. Raises UserError if there are only pickled
    weights and `allow_pickle` is not set.
    """
    if any(name.startswith("model") for name in blobs) or not (
        pickles := find_pickles(folder.path)
    ):
        return safetensors.load_tensors(folder, blobs)
    if not allow_pickle:
        raise pickles_not_allowed(folder.path, [file.name for file in pickles])
    return load_pickles(folder)


def _without_wrappers(stored: Tensors) -> tuple[Tensors, list[str]]:
    """Return the tensors without the words that wrappers of PyTorch, such as torch.compile, add to
    their names, and notes for the user. All names stay as they are if two would become equal.
    """
    short_names = {name: WRAPPER_PATTERN.sub("", name) for name in stored}
    words = {match[0] for name in stored for match in WRAPPER_PATTERN.finditer(name)}
    if not words or len(set(short_names.values())) < len(stored):
        return stored, []
    tensors = {
        short_names[name]: replace(tensor, name=short_names[name])
        for name, tensor in stored.items()
    }
    return tensors, [f"names of tensors are read without {', '.join(sorted(words))}"]


def _tokenizer_folder(
    checkpoint: CheckpointFolder, override: Path | None, config: CheckpointConfig
) -> CheckpointFolder:
    """Return the folder from which the tokenizer is read: `override` if it is given, else the
    checkpoint's folder.

    Raises UserError if the folder contains no tokenizer. The error then names the checkpoint's
    parent model, because its tokenizer fits.
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


def _float_dtype(stored: Tensors) -> str:
    """Return the dtype of the checkpoint's first float matrix, or "BF16" if there is none.
    torch_dtype in config.json is not used, because it can be wrong.
    """
    return next(
        (
            t.dtype
            for t in stored.values()
            if len(t.shape) > 1 and t.dtype in safetensors.FLOAT_DTYPES
        ),
        "BF16",
    )


def _model_facts(arch: Arch, keys: list[ArchKey]) -> ModelFacts:
    """Return the properties of the model that the rules for tensor types need. They are read from
    the metadata keys of the converted file; of keys with a number for each layer, the first counts,
    as in llama.cpp.
    """
    numbers: dict[str, int] = {}
    for key in keys:
        first = key.value[0] if isinstance(key.value, list) and key.value else key.value
        if isinstance(first, int):
            numbers[key.name] = first
    heads = numbers["attention.head_count"]
    return ModelFacts(
        architecture=arch.name,
        layers=numbers["block_count"],
        heads=heads,
        kv_heads=numbers.get("attention.head_count_kv", heads),
        experts=numbers.get("expert_count", 0),
        prediction_layers=numbers.get("nextn_predict_layers", 0),
    )


def _choose_layers(
    arch: Arch, config: CheckpointConfig, tensors: Tensors, with_prediction: bool
) -> tuple[Tensors, CheckpointConfig, list[str]]:
    """Return the tensors to convert, the config with the number of layers among them that predict
    further tokens, and notes for the user. `with_prediction`: whether to convert these layers.
    """
    config = prediction.with_layer_count(config, 0)
    if arch.prediction_shapes is None:
        return tensors, config, []
    normal_count = config.get_int("num_hidden_layers")
    name_layer = arch.prediction_name or prediction.layer_name
    # tensors with names that are taken stay unchanged
    tensors = block_tensors.rename_tensors(tensors, lambda name: name_layer(config, name))
    others, predicting = prediction.split_layers(tensors, normal_count)
    count = prediction.count_layers(predicting, normal_count)
    if not count:
        return tensors, config, []
    layers = "1 layer that predicts" if count == 1 else f"{count} layers that predict"
    what = f"{layers} further tokens (MTP)"
    if not with_prediction:
        return others, config, [f"left out: {what}"]
    place = f"block {normal_count}" + (f" to {normal_count + count - 1}" if count > 1 else "")
    note = f"converted as {place}: {what}; --no-mtp leaves {'it' if count == 1 else 'them'} out"
    return tensors, prediction.with_layer_count(config, count), [note]


def read_family(folder: CheckpointFolder) -> tuple[Arch, CheckpointConfig]:
    """Return the model family of a checkpoint folder, and the checkpoint's settings.

    The settings have the text model's settings at the root, the family's defaults for everything
    that config.json omits, and the content of POOLING_FILE. Raises UserError for families that are
    not supported, and for more layers than llama.cpp allows.
    """
    stored = _config(folder)
    arch, config = _arch(folder.path, stored).resolve(stored)
    layout.layer_count(config)
    return arch, config


def _config(folder: CheckpointFolder) -> CheckpointConfig:
    """Return the settings in config.json. For a multimodal model, those in text_config are moved to
    the root, and the class names of both levels are merged, supported ones first.
    """
    path = folder.path
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", hint="check the path")
    if not folder.has_file("config.json"):
        raise adapter_error(path) or UserError(
            f"{path} has no config.json", hint="name a checkpoint folder, or a .gguf file"
        )
    values = folder.read_json("config.json")
    if values.get("draft_vocab_size") is not None:
        raise UserError(
            f"{path} is an EAGLE-3 draft: converting it takes the checkpoint of its model, too, "
            "which llmcli does not read",
            hint="pull a GGUF of this draft, and use it with llmcli chat REF -md FILE",
        )
    values = values | {POOLING_FILE: folder.read_optional_json(POOLING_FILE)}
    if isinstance(text := values.get("text_config"), dict):
        # the class of the whole model takes precedence over that of its text part
        classes = [*_class_names(values), *_class_names(text)]
        classes.sort(key=lambda name: name not in ARCHS)
        values = values | text | {"architectures": classes, "model_type": values.get("model_type")}
    return CheckpointConfig(values, str(path / "config.json"))


def _class_names(values: Mapping[str, Any]) -> list[str]:
    """Return the model's class names in config.json ("architectures"); an empty list if there are
    none.
    """
    names = values.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _class_of_type(kind: object) -> list[str]:
    """Return the supported class name for a model_type, as a list with one name or none. It is used
    for a config.json without class names.

    Example: "qwen2_moe" -> ["Qwen2MoeForCausalLM"].
    """
    if (name := CLASSES_OF_TYPES.get(str(kind))) in ARCHS:
        return [str(name)]
    stem = str(kind).removesuffix("_text").replace("_", "")
    by_name = {name.lower().replace("_", ""): name for name in ARCHS}
    endings = ("forcausallm", "forconditionalgeneration")
    return [by_name[stem + ending] for ending in endings if stem + ending in by_name][:1]


def _arch(path: Path, config: CheckpointConfig) -> Arch:
    """Return the model family that the first class name selects. Raises UserError if it is not
    supported.
    """
    class_names = _class_names(config.values) or _class_of_type(config.values.get("model_type"))
    name = class_names[0] if class_names else "unknown"
    if name not in ARCHS:
        nearest = difflib.get_close_matches(name, ARCHS, n=1)
        like = f"; the nearest is {nearest[0]}" if nearest else ""
        raise UnknownClassError(
            f"{path} is a {name}; supported are {', '.join(sorted(ARCHS))}{like}",
            "`llmcli quantize` has llama.cpp's own converter for others; or pull a GGUF of this model",
            name,
        )
    return ARCHS[name]


def _convert_weights(
    path: Path, arch: Arch, config: CheckpointConfig, stored: Tensors
) -> tuple[list[Weight], list[str]]:
    """Return all tensors of the converted file, under their GGUF names and in llama.cpp's order,
    and notes for the user. `stored` are the checkpoint's tensors as floats.

    Raises one UserError that lists all tensors that do not fit the family and config.json.
    """
    shapes = _family_shapes(arch, config)
    named = _drop_copies(config, _name_tensors(arch, config, stored))
    reduced = _drop_surplus(path, named, shapes)
    _check_tensors(path, reduced, shapes)
    weights = _transform(arch, config, reduced.tensors)
    zero_biases = len(named.tensors.keys() - reduced.tensors.keys() - {HEAD_NAME})
    notes = [
        f"{zero_biases} biases are left out: this family has none, and they are all zero"
    ] * bool(zero_biases)
    return weights, notes


@dataclass(frozen=True, slots=True)
class _FamilyShapes:
    """The shapes, rows first, of a family's required and optional tensors, by GGUF name."""

    required: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]

    @property
    def allowed(self) -> dict[str, tuple[int, ...]]:
        return self.optional | self.required


def _family_shapes(arch: Arch, config: CheckpointConfig) -> _FamilyShapes:
    """Return the shapes of a family's tensors, those of prediction layers included."""
    required, optional = arch.required_shapes(config), arch.optional_shapes(config)
    if arch.prediction_shapes is None or not prediction.layer_count(config):
        return _FamilyShapes(required, optional)
    normal_count = config.get_int("num_hidden_layers")
    return _FamilyShapes(
        required | prediction.repeat_shapes(config, arch.prediction_shapes(config), normal_count),
        optional
        | prediction.repeat_shapes(config, prediction.optional_shapes(config), normal_count),
    )


@dataclass(frozen=True, slots=True)
class _NamedTensors:
    """A checkpoint's tensors by GGUF name. `unknown` are the tensors for which this family has no
    GGUF name.
    """

    tensors: Tensors
    unknown: tuple[LazyTensor, ...]


def _name_tensors(arch: Arch, config: CheckpointConfig, stored: Tensors) -> _NamedTensors:
    """Return the checkpoint's tensors under their GGUF names, after the family's own preparation. A
    tensor whose GGUF name is taken already counts as unknown.
    """
    remaining = {
        name: item for name, item in stored.items() if not name.endswith(arch.dropped_endings)
    }
    block_count = config.get_int("num_hidden_layers") + prediction.layer_count(config)
    find_name = gguf_tables.find_names(arch.kind, block_count)
    named: Tensors = {}
    unknown = []
    for key, tensor in arch.prepare(config, remaining).items():
        name = _family_name(arch, key) or find_name(key)
        if name is None or name in named:
            unknown.append(tensor)
        else:
            named[name] = tensor
    return _NamedTensors(named, tuple(unknown))


def _drop_copies(config: CheckpointConfig, named: _NamedTensors) -> _NamedTensors:
    """Return the tensors without embeddings and heads of prediction layers that are copies of the
    model's. llama.cpp then uses those of the model.
    """
    tensors, normal_count = dict(named.tensors), config.get_int("num_hidden_layers")
    embedding = tensors.get(EMBEDDING_NAME)
    head = tensors.get(HEAD_NAME, embedding)
    for block in range(normal_count, normal_count + prediction.layer_count(config)):
        for role, original in (("embed_tokens", embedding), ("shared_head_head", head)):
            copy = tensors.get(name := f"blk.{block}.nextn.{role}.weight")
            if copy and original and _is_copy(copy, original, COMPARED_ROWS):
                del tensors[name]
    return _NamedTensors(tensors, named.unknown)


def _drop_surplus(path: Path, named: _NamedTensors, shapes: _FamilyShapes) -> _NamedTensors:
    """Return the tensors without two kinds that the file does not need: a head that is tied to the
    embedding, and biases that the family does not have and that are all zero. Raises UserError if a
    tied head differs from the embedding.
    """
    allowed, tensors = shapes.allowed, dict(named.tensors)
    if HEAD_NAME in tensors and HEAD_NAME not in allowed:
        _check_tied_head(path, tensors.pop(HEAD_NAME), tensors.get(EMBEDDING_NAME))
    surplus = [name for name in tensors if name not in allowed]
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="bias") as pool:
        are_zero = list(pool.map(lambda name: _is_zero_bias(name, tensors[name]), surplus))
    for name, is_zero in zip(surplus, are_zero, strict=True):
        if is_zero:
            del tensors[name]
    return _NamedTensors(tensors, named.unknown)


def _count_misfits(count: int) -> str:
    """Return "1 tensor does not", or the same words for more tensors."""
    return "1 tensor does not" if count == 1 else f"{count:,} tensors do not"


def _check_tensors(path: Path, named: _NamedTensors, shapes: _FamilyShapes) -> None:
    """Raise one UserError that lists all tensors that are unknown, missing, of the wrong shape or
    of an unreadable dtype. Return if there are none.
    """
    tensors, allowed = named.tensors, shapes.allowed
    misfits = [f"{tensor.name} is unknown" for tensor in named.unknown]
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
        is_incomplete = all(misfit.endswith(" is missing") for misfit in misfits)
        raise UserError(
            f"{path}: {_count_misfits(len(misfits))} fit its config.json: "
            f"{list_first(misfits, MAX_LISTED_MISFITS)}",
            hint="fetch the whole model again"
            if is_incomplete
            else "save the model in its standard form with save_pretrained() of transformers, or "
            "pull a GGUF of it",
        )


def _is_readable_dtype(dtype: str) -> bool:
    is_quantized = dtype in ggml.TYPE_NUMBERS and ggml.is_quantized(dtype)
    return is_quantized or dtype in safetensors.FLOAT_DTYPES


def _transform(arch: Arch, config: CheckpointConfig, tensors: Tensors) -> list[Weight]:
    """Return the tensors of the converted file as llama.cpp stores them, in llama.cpp's order. They
    include the tensors that the family computes from the settings.
    """
    if arch.needs_head and HEAD_NAME not in tensors:
        tensors = {**tensors, HEAD_NAME: tensors[EMBEDDING_NAME]}
    weights = [
        _computed_weight(name, values) for name, values in arch.extra_tensors(config).items()
    ]
    for name, tensor in tensors.items():
        op = arch.ops.get(_full_role(name), arch.ops.get(tensor_role(name)))
        weights.append(_weight(name, op(config, tensor) if op else tensor))
    return sorted(weights, key=lambda weight: tensor_types.tensor_order(weight.name))


def _full_role(name: str) -> str:
    """Return a tensor's role with all its words: "blk.3.nextn.enorm.weight" gives "nextn.enorm"."""
    return re.sub(r"^blk\.\d+\.|\.(?:weight|bias)$", "", name)


def _is_zero_bias(name: str, tensor: LazyTensor) -> bool:
    """Return whether a tensor is a bias whose values are all zero. Some quantization tools add such
    biases to families without biases.
    """
    vector = (
        name.endswith(".bias")
        and len(tensor.shape) == 1
        and tensor.dtype in safetensors.FLOAT_DTYPES
    )
    return vector and not tensor_views.read_floats(tensor).any()


def _family_name(arch: Arch, name: str) -> str | None:
    """Return the GGUF name of a checkpoint tensor according to the family's own table `Arch.names`,
    or None if the tensor is not in it. A name in this table may have its own ending, such as .scale.

    Example: "model.layers.3.mlp.router.weight" -> "blk.3.ffn_gate_inp.weight".
    """
    match = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if match and match[2] in arch.names:
        role = arch.names[match[2]]
        ending = "" if role.endswith(".scale") else match[3] or ".weight"
        return f"blk.{match[1]}.{role}{ending}"
    return None


def _check_tied_head(path: Path, head: LazyTensor, embedding: LazyTensor | None) -> None:
    """Raise UserError if `head` is not a copy of `embedding`, although config.json ties the head to
    the embedding. About 256 rows are compared.
    """
    if embedding is None or not _is_copy(head, embedding, 256):
        raise UserError(
            f"{path}: config.json ties the head to the embedding, but {head.name} is different",
            hint='to use this head, set "tie_word_embeddings": false in config.json',
        )


def _is_copy(tensor: LazyTensor, original: LazyTensor, compared_rows: int) -> bool:
    """Return whether two matrices are equal. About `compared_rows` rows are compared."""
    if (tensor.shape, tensor.dtype) != (original.shape, original.dtype):
        return False
    rows = range(0, tensor.shape[0], max(1, tensor.shape[0] // compared_rows))
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="row") as pool:
        return all(
            pool.map(
                lambda row: (tensor.read(row, row + 1) == original.read(row, row + 1)).all(), rows
            )
        )


def _weight(name: str, tensor: LazyTensor) -> Weight:
    """Return a tensor as a Weight of the converted file. Matrices keep their dtype. Norms, biases,
    routers and other vectors become F32, as llama.cpp expects.
    """
    shape = tuple(reversed(tensor.shape))
    if len(shape) > 1 and name.endswith(".weight") and not name.endswith(F32_ENDINGS):
        return Weight(name, shape, tensor.dtype, tensor.read)
    return Weight(name, shape, "F32", tensor_views.map_values(tensor, lambda values: values).read)


def _computed_weight(name: str, values: "F32") -> Weight:
    """Return a vector that was computed from the settings as an F32 Weight."""
    import numpy as np

    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(1, -1)
    return Weight(name, (values.size,), "F32", lambda first, last: data[first:last])
