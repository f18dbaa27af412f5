"""Get a model file whose memory `llmcli plan` can compute by a dry run of llama.cpp, without
downloading or quantizing weights.

It is the real file if that is on this disk. Otherwise it is a stand-in: a sparse file with the
header that the real file has or would have, and a hole in place of the weights. The hole takes no
disk space, and a dry run reads only the header.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import fetch, remote_checkpoint, store
from llmcli.catalog.fetch import FetchedModel
from llmcli.catalog.hub.range_reader import RangesUnsupported, RemoteFile
from llmcli.catalog.sources import hub
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader.installed_model import installed_model
from llmcli.model_loader.prepare import canonical_type, catalog_type
from llmcli.ui import UI
from llmcli.units import format_size

if TYPE_CHECKING:
    from quant.source.source import Source

# how many bytes of a remote GGUF are fetched first, and at most, to get its header
FIRST_HEADER_BYTES, MAX_HEADER_BYTES = 1 << 18, 1 << 27


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A GGUF file, real or stand-in, that llama.cpp can open in a dry run."""

    name: str  # name of the model
    path: Path
    unloadable_reason: str = ""  # why the file cannot be loaded, such as missing weights; or ""
    # whether the original model is a GGUF of quantized weights, so that floats are not available
    is_quantized: bool = False
    is_stand_in: bool = False  # whether the real file has not been quantized yet


@contextmanager
def planned_file(ref: str, quant: str | None, config: Config, ui: UI) -> Iterator[PlannedFile]:
    """Yield the file from which the model `ref` would be run, or a stand-in for it. Only headers
    are downloaded, and nothing is quantized. If llmcli has no family for a checkpoint, llama.cpp's
    converter writes the header. A stand-in is deleted after the `with` block. `quant`: the requested
    type; None: the type in the name or the catalog.

    Raises UserError.
    """
    file_type = canonical_type(quant) if quant else None
    model = installed_model(fetch.resolve_ref(ref, config), config, ui, ref)
    with tempfile.TemporaryDirectory(prefix="llmcli-plan-") as folder:
        if model is None:
            yield _remote_file(ref, file_type, Path(folder), config, ui)
            return
        target_type = file_type or model.quant or catalog_type(model)
        if existing_file := _existing_file(model, target_type, config):
            yield PlannedFile(model.name, existing_file, is_quantized=_is_quantized(model.path))
            return
        assert target_type
        with _open_source(model, Path(folder), config, ui) as source:
            stand_in = _write_stand_in(source, target_type, Path(folder))
        yield PlannedFile(
            model.name,
            stand_in,
            f"not quantized to {target_type} yet",
            _is_quantized(model.path),
            True,
        )


def _is_quantized(path: Path) -> bool:
    """Return whether `path` is a GGUF of quantized weights. False for a checkpoint folder."""
    from quant.model_file import read_header
    from quant.recipes.file_types import FLOAT_FILE_TYPES

    return path.is_file() and read_header.read_header(path).file_type not in FLOAT_FILE_TYPES


def _existing_file(model: FetchedModel, file_type: str | None, config: Config) -> Path | None:
    """Return the path of the model's GGUF of the type `file_type`, or None if it is not on this
    disk. With `file_type` None, any GGUF of the model will do.
    """
    from quant.model_file import read_header

    if model.kind == "gguf" and (
        file_type is None or read_header.read_header(model.path).file_type == file_type
    ):
        return model.path
    quantized = store.load_quantized(config, model, file_type) if file_type else None
    return Path(quantized.path) if quantized else None


@contextmanager
def _open_source(model: FetchedModel, folder: Path, config: Config, ui: UI) -> Iterator["Source"]:
    """Open the GGUF or the checkpoint of a model as a Source, of which only the header can be read.
    `folder`: where a stand-in for a checkpoint on the hub may be written. Raises UserError.
    """
    from llmcli.model_loader.llama_converter import choose_converter
    from quant.convert import checkpoint_source
    from quant.quantize import write

    if model.kind == "gguf":
        yield write.open_gguf(model.path)
    elif reason := choose_converter.reason_for_llama_cpp(model.path, "auto"):
        from llmcli.model_loader.llama_converter.converted_source import convert_checkpoint

        path = _write_checkpoint_stand_in(model, folder) if model.blobs else model.path
        with convert_checkpoint(
            path, reason, config, ui, allow_pickle=config.allow_pickle
        ) as checkpoint:
            yield checkpoint.source
    else:
        yield checkpoint_source.open_checkpoint(
            model.path, allow_pickle=config.allow_pickle, blobs=model.blobs
        )


def _write_checkpoint_stand_in(model: FetchedModel, folder: Path) -> Path:
    """Write a stand-in for a checkpoint on the hub, and return its folder: links to its small
    files, and sparse safetensors with their headers and a hole in place of the weights. llama.cpp's
    converter reads no weights before it has written its own header.
    """
    from quant.checkpoint import safetensors

    assert model.blobs is not None
    stand_in = folder / "checkpoint" / model.name.rpartition("/")[2]
    for path in map(Path, model.record["beside"]):
        link = stand_in / path.relative_to(model.path)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    for name, blob in model.blobs.items():
        header_bytes = int.from_bytes(blob.read(0, min(8, blob.size)).tobytes(), "little")
        nbytes = min(8 + header_bytes, 8 + safetensors.MAX_HEADER_BYTES, blob.size)
        with (stand_in / name).open("wb") as stream:
            stream.write(blob.read(0, nbytes).data)
            stream.truncate(blob.size)
    return stand_in


def _write_stand_in(source: "Source", file_type: str, folder: Path) -> Path:
    """Write a stand-in for the file that quantizing `source` to `file_type` would write, and return
    its path. Its header lacks the digest of the weights, because no weights are read.
    """
    from quant.gguf.layout import encode_entry, lay_out_file
    from quant.quantize.plan import plan_quantization

    plan = plan_quantization(source, file_type)
    entries = {
        **dict(source.entries),
        "general.file_type": encode_entry("uint32", plan.file_type.number),
    }
    tensors = [(step.weight.name, step.weight.shape, step.type) for step in plan.steps]
    layout = lay_out_file([*entries.items()], tensors, source.alignment)
    path = folder / "made.gguf"
    with path.open("wb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    return path


def _remote_file(
    ref: str, file_type: str | None, folder: Path, config: Config, ui: UI
) -> PlannedFile:
    """Return a stand-in for a model that is only on the hub: with the header of a GGUF there, or
    with the header that quantizing the model would write. `folder`: where to write it.

    Raises UserError, also if the hub cannot be reached.
    """
    from quant.model_file import read_header
    from quant.quantize.write import open_gguf
    from quant.recipes.file_types import FLOAT_FILE_TYPES

    resolved = fetch.resolve_ref(ref, config)
    name, target_type = (
        resolved.ref.full_name,
        file_type or (resolved.ref.quant if resolved.ref.kind == "catalog" else None),
    )
    pull = f"llmcli pull {name}"
    specs = [spec for spec in resolved.sources if spec.kind == "hub"]
    if config.offline or not specs:
        reason = (
            "and llmcli runs offline"
            if config.offline
            else "and only the hub serves parts of files"
        )
        raise UserError(f"{name} is not on this disk, {reason}", hint=pull)
    try:
        files = hub.find_remote_gguf(specs[0], config, ui)
        if files is None:
            return _remote_checkpoint(ref, file_type, folder, config, ui)
        paths = [_fetch_header(file, folder / file.path.name) for file in files]
    except RangesUnsupported as error:
        raise UserError(str(error), hint=pull) from None
    reason = f"header of a file of {format_size(sum(file.size for file in files))} on the hub"
    header = read_header.read_header(paths[0])
    if target_type is None and resolved.entry and header.file_type in FLOAT_FILE_TYPES:
        target_type = resolved.entry.quant
    if target_type is None or target_type == header.file_type:
        return PlannedFile(name, paths[0], reason, _is_quantized(paths[0]))
    stand_in = _write_stand_in(open_gguf(paths[0]), target_type, folder)
    return PlannedFile(
        name,
        stand_in,
        f"{reason}, not quantized to {target_type} yet",
        _is_quantized(paths[0]),
        True,
    )


def _remote_checkpoint(
    ref: str, file_type: str | None, folder: Path, config: Config, ui: UI
) -> PlannedFile:
    """Return a stand-in for the quantization of a checkpoint on the hub. Raises UserError if its
    weights cannot be read in parts.
    """
    model = remote_checkpoint.open_remote_checkpoint(ref, config, _SilentProgress(ui), source="hub")
    if model is None:
        raise UserError(
            f"{ref} is not on this disk, and its weights cannot be read in parts",
            hint=f"llmcli pull {ref}",
        )
    target_type = file_type or model.quant
    assert target_type, model
    with _open_source(model, folder, config, ui) as source:
        stand_in = _write_stand_in(source, target_type, folder)
    return PlannedFile(
        model.name,
        stand_in,
        f"a checkpoint on the hub, not quantized to {target_type} yet",
        is_stand_in=True,
    )


def _fetch_header(file: RemoteFile, path: Path) -> Path:
    """Write a sparse file at `path` with the size and the header of a remote GGUF, and return
    `path`. The length of a header is unknown, so the fetched part is doubled until it is complete.

    Raises UserError if the remote file is not a valid GGUF.
    """
    from quant.errors import UserError
    from quant.gguf.header import read_file_header

    with path.open("wb") as stream:
        stream.truncate(file.size)
    fetched_bytes = 0
    while True:
        target_bytes = min(max(FIRST_HEADER_BYTES, 2 * fetched_bytes), file.size)
        with path.open("r+b") as stream:
            stream.seek(fetched_bytes)
            stream.write(file.read(fetched_bytes, target_bytes - fetched_bytes).data)
        fetched_bytes = target_bytes
        try:
            if read_file_header(path).data_offset <= fetched_bytes:
                return path
        except UserError:  # the header is incomplete, or the file is invalid
            if fetched_bytes == file.size or fetched_bytes >= MAX_HEADER_BYTES:
                raise


class _SilentProgress:
    """A ProgressDisplay without notes. Notes about reading a checkpoint would be wrong here,
    because it is only planned.
    """

    def __init__(self, ui: UI) -> None:
        self.bar = ui.bar

    def note(self, text: str) -> None:
        """Do nothing."""
