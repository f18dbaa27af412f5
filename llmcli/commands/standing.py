"""A model as `plan` needs it: the file that would be run, or one that stands in for it.

A stand-in has the real header and, where the weights would be, a hole that takes no room on the
disk: llama.cpp's dry run reads no further. So what is not quantized yet is planned like all else,
and so is what is still on the hub, of which the header alone is fetched (of a checkpoint the small
files, and the tables at the heads of its safetensors).
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import fetch, store, straight
from llmcli.catalog.fetch import Model
from llmcli.catalog.hub.ranges import NoRanges, RemoteFile
from llmcli.catalog.sources import hub
from llmcli.commands.ready import FLOATS, checked, promised
from llmcli.commands.show import present
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.ui import UI, size

if TYPE_CHECKING:
    from quant.source import Source

FIRST, MOST = 1 << 18, 1 << 27  # bytes of a header that are asked for at once, and at most


@dataclass(frozen=True, slots=True)
class Standing:
    """`path` can be rehearsed; where `lacks` says why, it cannot be loaded. `quantized`: no floats
    are to be had. `sketched`: nobody has made this file yet.
    """

    name: str
    path: Path
    lacks: str = ""
    quantized: bool = False
    sketched: bool = False


@contextmanager
def standing(ref: str, quant: str | None, config: Config, ui: UI) -> Iterator[Standing]:
    """What `ref` would be run from; nothing is fetched but headers, nothing made. Raises Refusal."""
    file_type = checked(quant) if quant else None
    model = present(fetch.resolve(ref, config), config, ui, ref)
    with tempfile.TemporaryDirectory(prefix="llmcli-plan-") as folder:
        if model is None:
            yield _distant(ref, file_type, Path(folder), config, ui)
            return
        wanted = file_type or model.quant or promised(model)
        if there := _there(model, wanted, config):
            yield Standing(model.name, there, quantized=_quantized(model.path))
            return
        assert wanted
        made = _made(_open(model), wanted, Path(folder))
        yield Standing(
            model.name, made, f"not quantized to {wanted} yet", _quantized(model.path), True
        )


def _quantized(path: Path) -> bool:
    """Whether what is there is a GGUF of rounded weights."""
    from quant import container

    return path.is_file() and container.read(path).file_type not in FLOATS


def _there(model: Model, wanted: str | None, config: Config) -> Path | None:
    """The file itself, if it is here and of the type that is wanted."""
    from quant import container

    if model.kind == "gguf" and (wanted is None or container.read(model.path).file_type == wanted):
        return model.path
    made = store.load_derived(config, model, wanted) if wanted else None
    return Path(made.path) if made else None


def _open(model: Model) -> "Source":
    from quant import convert
    from quant import quantize as road

    return (
        road.open_gguf(model.path)
        if model.kind == "gguf"
        else convert.open_folder(model.path, blobs=model.blobs)
    )


def _made(source: "Source", wanted: str, folder: Path) -> Path:
    """The header that quantizing would write, but for what tells sources apart, which is read off
    the weights.
    """
    from quant import quantize as road
    from quant import writer

    plan = road.plan(source, wanted)
    entries = {
        **dict(source.entries),
        "general.file_type": writer.entry("uint32", plan.file_type.number),
    }
    tensors = [(step.weight.name, step.weight.shape, step.type) for step in plan.steps]
    layout = writer.layout([*entries.items()], tensors, source.alignment)
    path = folder / "made.gguf"
    with path.open("wb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    return path


def _distant(ref: str, file_type: str | None, folder: Path, config: Config, ui: UI) -> Standing:
    """What the hub has: a GGUF's own header, or that of what would be made of a checkpoint."""
    from quant import container
    from quant import quantize as road

    wanted = fetch.resolve(ref, config)
    name, asked = (
        wanted.ref.full,
        file_type or (wanted.ref.quant if wanted.ref.kind == "catalog" else None),
    )
    pull = f"llmcli pull {name}"
    specs = [spec for spec in wanted.sources if spec.kind == "hub"]
    if config.offline or not specs:
        why = "and this is offline" if config.offline else "and only the hub gives parts of files"
        raise UserError(f"{name} is not here, {why}", hint=pull)
    try:
        files = hub.distant(specs[0], config, ui)
        if files is None:
            return _checkpoint(ref, file_type, folder, config, ui)
        paths = [_header(file, folder / file.path.name) for file in files]
    except NoRanges as error:
        raise UserError(str(error), hint=pull) from None
    lacks = f"header of {size(sum(file.size for file in files))} on the hub"
    header = container.read(paths[0])
    if asked is None and wanted.entry and header.file_type in FLOATS:
        asked = wanted.entry.quant
    if asked is None or asked == header.file_type:
        return Standing(name, paths[0], lacks, _quantized(paths[0]))
    made = _made(road.open_gguf(paths[0]), asked, folder)
    return Standing(
        name, made, f"{lacks}, not quantized to {asked} yet", _quantized(paths[0]), True
    )


def _checkpoint(ref: str, file_type: str | None, folder: Path, config: Config, ui: UI) -> Standing:
    model = straight.open_checkpoint(ref, config, _Quiet(ui), source="hub")
    if model is None:
        raise UserError(
            f"{ref} is not here, and its weights cannot be read in parts", hint=f"llmcli pull {ref}"
        )
    wanted = file_type or model.quant
    assert wanted, model
    made = _made(_open(model), wanted, folder)
    return Standing(
        model.name, made, f"a checkpoint on the hub, not quantized to {wanted} yet", sketched=True
    )


def _header(file: RemoteFile, path: Path) -> Path:
    """A file of the same size whose header is the remote one's, fetched until it is whole; behind
    it is a hole.
    """
    from quant.errors import Refusal
    from quant.header import parse

    with path.open("wb") as stream:
        stream.truncate(file.size)
    have = 0
    while True:
        want = min(max(FIRST, 2 * have), file.size)
        with path.open("r+b") as stream:
            stream.seek(have)
            stream.write(file.read(have, want - have).data)
        have = want
        try:
            if parse(path).data_offset <= have:
                return path
        except Refusal:  # it ends in the hole, or it is no sound file at all
            if have == file.size or have >= MOST:
                raise


class _Quiet:
    """A watcher for a look at a checkpoint: what reading all of it would mean is not said."""

    def __init__(self, ui: UI) -> None:
        self.bar = ui.bar

    def note(self, text: str) -> None:
        """Nothing is read that would need a word."""
