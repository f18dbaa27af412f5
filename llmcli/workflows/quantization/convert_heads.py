"""`llmcli convert --heads`: trained draft heads become a GGUF of llmcli's own kind (heads_file.py).

Two forms are read, as safetensors or as a pickled file:

- Medusa, as its authors publish it: `{head}.{layer}.linear.weight` and `.bias` are residual blocks,
  and `{head}.{layers}.weight` is an output matrix. The file may have the prefix `medusa_head.`, and
  config.json may have medusa_num_heads and medusa_num_layers.
- Blockwise: `hidden.weight` and `.bias`, and `{head}.weight` and `.bias`. No checkpoints are
  published; scripts/quality/train_heads.py writes this form.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.errors import UserError
from llmcli.model_loader.quantize_file import find_model
from llmcli.runtime.drafting.draft_files import heads_file
from llmcli.runtime.drafting.draft_files.heads_file import BLOCKWISE, MEDUSA, HeadShapes
from llmcli.runtime.drafting.draft_files.vocabulary_match import vocabulary_hash
from llmcli.text_input import expand_path
from llmcli.workflows.quantization.convert_adapter import default_path
from quant.checkpoint import pickles, safetensors
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.safetensors import LazyTensor
from quant.gguf.header import DEFAULT_ALIGNMENT_BYTES
from quant.gguf.layout import FileLayout, encode_entry, lay_out_file
from quant.gguf.resumable_writer import ResumableWriter
from quant.model_file import load_checks
from quant.model_file.load_checks import HEADS_ARCHITECTURE
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header
from quant.native import ggml
from quant.quantize.output_files import find_written, require_output_name, require_writable_file
from quant.quantize.plan import SETTINGS_KEY, SOURCE_KEY
from quant.source.blob import read_row_samples

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.quantize_file import OutputSettings
    from llmcli.ui import UI

# The last one may be the model that the heads were trained for.
WEIGHT_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "medusa_lm_head.bin",
    "model.safetensors",
)
PREFIX, OUTPUT_ENDING = "medusa_head.", ".output.weight"
CHUNK_ROWS = 1024  # rows that are converted at once
LAYER_NAME = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.linear\.(weight|bias)")
OUTPUT_NAME = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.weight")
BLOCKWISE_NAME = re.compile(r"([0-9]{1,4})\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class HeadsRequest:
    """A request to convert the draft heads in `folder`. `base`: the model that they were trained
    for, as a GGUF file or a name. `outtype`: the type of the matrices; "auto": that of the first
    one.
    """

    folder: Path
    base: str | None
    outtype: str
    allow_pickle: bool
    output: "OutputSettings"


@dataclass(frozen=True, slots=True)
class HeadsResult:
    """The written file, or the one that would be written if `is_planned`. `is_present`: an earlier
    run had written it. `base`: the name of the model that the heads belong to.
    """

    path: Path
    nbytes: int
    shapes: HeadShapes
    base: str
    is_planned: bool = False
    is_present: bool = False


def convert_heads(request: HeadsRequest, config: "Config", ui: "UI") -> HeadsResult:
    """Convert draft heads. Raises UserError if the folder has none, or those of another model."""
    folder = expand_path(str(request.folder)).absolute()
    source = _read_source(folder, allow_pickle=request.allow_pickle)
    base = _require_base(request.base, folder)
    model = _find_model(base, config, ui)
    shapes, tensors = _arrange(folder, source, model)
    hash_of_vocabulary = vocabulary_hash(model)
    kind = _matrix_type(folder, request.outtype, tensors)
    kinds = {name: "F32" if len(shape) == 1 else kind for name, shape in shapes.tensors().items()}
    out = request.output.out or default_path(folder, "heads")
    require_output_name(out)
    if not request.output.dry_run:
        files = {tensor.file for tensor in tensors.values()}
        require_writable_file(files, out, force=request.output.force)
    settings = json.dumps({"type": kind, "vocabulary": hash_of_vocabulary})
    digest = _fingerprint(tensors)
    layout = _lay_out(
        shapes, hash_of_vocabulary, kinds, {SOURCE_KEY: digest, SETTINGS_KEY: settings}
    )
    if not request.output.force and find_written(out, digest, settings):
        ui.note(f"{out} is up to date: nothing to do (--force makes it again)")
        return HeadsResult(out, layout.nbytes, shapes, base, is_present=True)
    if request.output.dry_run:
        return HeadsResult(out, layout.nbytes, shapes, base, is_planned=True)
    _write(out, layout, tensors, {"source": digest, "settings": settings}, ui)
    return HeadsResult(out, layout.nbytes, shapes, base)


def _require_base(name: str | None, folder: Path) -> str:
    """Return the model that the user has named. Raises UserError if it is None."""
    if name is not None:
        return name
    trained_for = (
        CheckpointFolder(folder).read_optional_json("config.json").get("base_model_name_or_path")
    )
    of = f", a GGUF of {trained_for}" if isinstance(trained_for, str) and trained_for else ""
    raise UserError(
        "convert --heads needs the model that the heads were trained for" + of,
        hint=f"llmcli convert MODEL --heads {shlex.quote(str(folder))}",
    )


def _find_model(name: str, config: "Config", ui: "UI") -> ModelHeader:
    """Return the header of the model that the heads belong to. Raises UserError if there is no GGUF
    of this name.
    """
    model = find_model(name, config, ui)
    path = model.path if model else expand_path(name).absolute()
    if path.is_dir():
        raise UserError(
            f"{name} is a checkpoint, and draft heads are converted for a GGUF",
            hint=f"convert it first: llmcli convert {shlex.quote(name)}",
        )
    header = read_header(path)
    load_checks.require_model(header)
    return header


def _read_source(folder: Path, *, allow_pickle: bool) -> list[LazyTensor]:
    """Return the tensors of the first of WEIGHT_FILES that a folder has. Raises UserError if it has
    none of them, or a pickled one that the user has not allowed to be read.
    """
    if folder.is_file():
        raise UserError(
            f"{folder} is a file, but --heads takes the folder of a checkpoint",
            hint=f"llmcli convert MODEL --heads {shlex.quote(str(folder.parent))}",
        )
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", hint="name the folder of draft heads")
    name = next((name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if name is None:
        raise UserError(
            f"{folder} has no draft heads: neither {' nor '.join(WEIGHT_FILES)}",
            hint="name the folder of a Medusa checkpoint",
        )
    if name.endswith(".safetensors"):
        return list(safetensors.read_safetensors(folder / name))
    if not allow_pickle:
        raise pickles.pickles_not_allowed(folder, [name])
    return list(pickles.read_pickle(folder / name))


def _arrange(
    folder: Path, source: Sequence[LazyTensor], model: ModelHeader
) -> tuple[HeadShapes, dict[str, LazyTensor]]:
    """Return the sizes of the heads in a folder, and their tensors by their names in the GGUF, in
    its order. Raises UserError if tensors are unknown, are missing, or do not fit the model.
    """
    names = [tensor.name.removeprefix(PREFIX) for tensor in source]
    method = BLOCKWISE if "hidden.weight" in names else MEDUSA
    layers = [int(match[2]) for match in map(LAYER_NAME.fullmatch, names) if match]
    n_layers = 1 + max(layers, default=0)
    named: dict[str, LazyTensor] = {}
    for name, stored in zip(names, source, strict=True):
        gguf_name = _gguf_name(folder, name, method, n_layers)
        if gguf_name in named:
            raise UserError(
                f"{folder} has {gguf_name} twice: as {named[gguf_name].name[:80]!r} and as "
                f"{stored.name[:80]!r}",
                hint="fetch the checkpoint again",
            )
        named[gguf_name] = stored
    n_heads = 1 + max(
        (int(name.split(".")[1]) for name in named if name.startswith("head.")), default=-1
    )
    inputs = named.get("hidden.weight") or next(
        (tensor for name, tensor in named.items() if name.endswith(".weight")), None
    )
    if inputs is None or not n_heads:
        raise _incomplete(folder, "no matrix of a head is there")
    if n_heads > heads_file.MAX_HEADS or n_layers > heads_file.MAX_LAYERS:
        raise UserError(
            f"{folder} has {n_heads} heads of {n_layers} layers; llmcli reads at most "
            f"{heads_file.MAX_HEADS} of {heads_file.MAX_LAYERS}",
            hint="convert other draft heads",
        )
    n_embd, n_vocab = heads_file.model_n_embd(model), heads_file.output_matrix(model).shape[1]
    if inputs.shape[-1] != n_embd:
        raise _unfitting(
            folder,
            model,
            f"they read states of {inputs.shape[-1]} values, and the model's have {n_embd}",
        )
    outputs = [tensor for name, tensor in named.items() if name.endswith(OUTPUT_ENDING)]
    if outputs and outputs[0].shape[0] != n_vocab:
        raise _unfitting(
            folder,
            model,
            f"they guess one of {outputs[0].shape[0]} tokens, and the model has {n_vocab}",
        )
    hidden = named.get("hidden.bias")
    shapes = HeadShapes(
        method,
        n_embd,
        n_vocab,
        n_heads,
        n_layers,
        hidden.shape[0] if hidden else 0,
        bool(outputs),
    )
    expected = shapes.tensors()
    if missing := [name for name in expected if name not in named]:
        raise _incomplete(folder, f"{missing[0]} is missing")
    for name, shape in expected.items():
        tensor = named[name]
        if tensor.shape != shape[::-1]:
            raise _incomplete(
                folder, f"{tensor.name} is {list(tensor.shape)}, not {list(shape[::-1])}"
            )
        if tensor.dtype not in safetensors.FLOAT_DTYPES:
            raise UserError(
                f"{tensor.name} in {folder} is stored as {tensor.dtype}, which draft heads cannot be",
                hint="save the heads as float16",
            )
    _check_config(folder, shapes)
    return shapes, {name: named[name] for name in expected}


def _gguf_name(folder: Path, name: str, method: str, n_layers: int) -> str:
    """Return the name that a tensor gets in the GGUF. `n_layers`: the residual blocks of a Medusa
    head, after which the number of its output matrix comes. Raises UserError for an unknown tensor.
    """
    if method == BLOCKWISE:
        if name in ("hidden.weight", "hidden.bias"):
            return name
        if match := BLOCKWISE_NAME.fullmatch(name):
            return f"head.{int(match[1])}.{match[2]}"
    elif match := LAYER_NAME.fullmatch(name):
        return f"head.{int(match[1])}.{int(match[2])}.{match[3]}"
    elif match := OUTPUT_NAME.fullmatch(name):
        if int(match[2]) != n_layers:
            raise UserError(
                f"{folder} has an output matrix {name}, which should be {match[1]}.{n_layers}.weight "
                f"after {n_layers} layers",
                hint="fetch the checkpoint again",
            )
        return f"head.{int(match[1])}{OUTPUT_ENDING}"
    raise UserError(
        f"{folder} has a tensor {name[:80]!r}, which draft heads do not have",
        hint="name the folder of a Medusa checkpoint",
    )


def _check_config(folder: Path, shapes: HeadShapes) -> None:
    """Raise UserError if config.json names more heads or other layers than the weights have. Some
    published files name fewer heads.
    """
    values = CheckpointFolder(folder).read_optional_json("config.json")
    n_heads, n_layers = values.get("medusa_num_heads"), values.get("medusa_num_layers")
    named = []
    if isinstance(n_heads, int) and n_heads > shapes.n_heads:
        named.append(f"{n_heads} heads")
    if isinstance(n_layers, int) and n_layers != shapes.n_layers:
        named.append(f"{n_layers} layers")
    if shapes.method == MEDUSA and named:
        raise UserError(
            f"the config.json of {folder} names {' and '.join(named)}, but its weights are "
            f"{shapes.n_heads} heads of {shapes.n_layers} layers",
            hint="fetch the checkpoint again",
        )


def _unfitting(folder: Path, model: ModelHeader, why: str) -> UserError:
    return UserError(
        f"the heads in {folder} do not fit {model.path.name}: {why}",
        hint="name the model that they were trained for: "
        f"llmcli convert MODEL --heads {shlex.quote(str(folder))}",
    )


def _incomplete(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder} does not have all weights of its heads: {why}",
        hint="fetch the checkpoint again",
    )


def _matrix_type(folder: Path, outtype: str, tensors: Mapping[str, LazyTensor]) -> str:
    """Return the type of the matrices in the GGUF. Raises UserError if a row cannot have it."""
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    if outtype == "auto":
        return matrices[0].dtype
    kind = outtype.upper()
    block = ggml.block_size(kind).values
    if wrong := [tensor.name for tensor in matrices if tensor.shape[-1] % block]:
        raise UserError(
            f"the rows of {wrong[0]} in {folder} are no multiple of {block}, as {kind} needs",
            hint="use --outtype f16",
        )
    return kind


def _fingerprint(tensors: Mapping[str, LazyTensor]) -> str:
    """Return a digest of the shapes and of samples of the weights, which does not depend on the
    form of their file.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        row_bytes = tensor.shape[-1] * safetensors.DTYPE_BYTES[tensor.dtype]
        for sample in read_row_samples(tensor.read, _row_count(tensor), row_bytes):
            digest.update(sample.tobytes())
    return digest.hexdigest()[:32]


def _row_count(tensor: LazyTensor) -> int:
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _lay_out(
    shapes: HeadShapes, vocabulary: str, kinds: Mapping[str, str], own_keys: Mapping[str, str]
) -> FileLayout:
    """Return the layout of the file. `vocabulary`: the hash of the model's."""
    entries = [
        ("general.architecture", encode_entry("string", HEADS_ARCHITECTURE)),
        (f"{HEADS_ARCHITECTURE}.{heads_file.METHOD}", encode_entry("string", shapes.method)),
        (f"{HEADS_ARCHITECTURE}.{heads_file.VOCABULARY_HASH}", encode_entry("string", vocabulary)),
        *(
            (f"{HEADS_ARCHITECTURE}.{key}", encode_entry("uint32", value))
            for key, value in (
                (heads_file.EMBEDDING, shapes.n_embd),
                (heads_file.VOCABULARY_SIZE, shapes.n_vocab),
                (heads_file.HEADS, shapes.n_heads),
                (heads_file.LAYERS, shapes.n_layers),
            )
        ),
        *((key, encode_entry("string", value)) for key, value in own_keys.items()),
    ]
    tensors = [(name, shape, kinds[name]) for name, shape in shapes.tensors().items()]
    return lay_out_file(entries, tensors, DEFAULT_ALIGNMENT_BYTES)


def _write(
    out: Path,
    layout: FileLayout,
    tensors: Mapping[str, LazyTensor],
    identity: dict[str, str],
    ui: "UI",
) -> None:
    """Write the file and show a progress bar. An interrupted run is continued after its last
    complete tensor.
    """
    writer = ResumableWriter(out, layout, identity)
    with (
        writer.open(),
        ui.bar(f"convert to {out.name}", layout.nbytes, done=writer.position) as bar,
    ):
        for slot in layout.slots:
            if writer.position >= slot.offset + slot.nbytes:
                continue
            writer.pad(slot.offset)
            tensor = tensors[slot.name]
            row_count = _row_count(tensor)
            for first in range(0, row_count, CHUNK_ROWS):
                stored = tensor.read(first, min(row_count, first + CHUNK_ROWS))
                if tensor.dtype != slot.type:
                    rows = ggml.decode(stored, tensor.dtype, tensor.shape[-1], label=slot.name)
                    stored = ggml.encode(rows, slot.type, label=slot.name)
                else:
                    ggml.require_finite(stored, slot.type, label=slot.name)
                writer.append(stored.tobytes())
                bar.advance(stored.nbytes)
            writer.checkpoint()
        writer.finish()
