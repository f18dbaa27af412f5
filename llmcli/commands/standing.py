"""A model as `plan` needs it: the file that would be run, or one that stands in for it.

A stand-in has the real header and, where the weights would be, a hole that takes no room on the disk: llama.cpp's dry
run reads no further. So what is not here yet, or not quantized yet, is planned like all else.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import fetch, store
from llmcli.catalog.fetch import Model
from llmcli.commands.ready import checked, promised
from llmcli.commands.show import present
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.ui import UI

if TYPE_CHECKING:
    from quant.writer import Layout


@dataclass(frozen=True, slots=True)
class Standing:
    """`path` can be rehearsed; where `lacks` says why, it cannot be loaded."""

    name: str
    path: Path
    lacks: str = ""


@contextmanager
def standing(ref: str, quant: str | None, config: Config, ui: UI) -> Iterator[Standing]:
    """What `ref` would be run from; nothing is fetched or made but headers. Raises Refusal."""
    file_type = checked(quant) if quant else None
    model = present(fetch.resolve(ref, config), config, ui, ref)
    if model is None:
        raise UserError(f"{ref} is not here", hint=f"llmcli pull {ref}")
    wanted = file_type or model.quant or promised(model)
    if there := _there(model, wanted, config):
        yield Standing(model.name, there)
        return
    assert wanted
    with tempfile.TemporaryDirectory(prefix="llmcli-plan-") as folder:
        yield Standing(model.name, _made(model, wanted, Path(folder)), f"it is not quantized to {wanted} yet")


def _there(model: Model, wanted: str | None, config: Config) -> Path | None:
    """The file itself, if it is here and of the type that is wanted."""
    from quant import container

    if model.kind == "gguf" and (wanted is None or container.read(model.path).file_type == wanted):
        return model.path
    made = store.load_derived(config, model, wanted) if wanted else None
    return Path(made.path) if made else None


def _made(model: Model, wanted: str, folder: Path) -> Path:
    """The header that quantizing would write, with a hole behind it."""
    from quant import convert
    from quant import quantize as road

    source = road.open_gguf(model.path) if model.kind == "gguf" else convert.open_folder(model.path, blobs=model.blobs)
    return _hollow(road.plan(source, wanted).layout, folder / "model.gguf")


def _hollow(layout: "Layout", path: Path) -> Path:
    with path.open("wb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    return path
