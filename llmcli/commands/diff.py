"""`llmcli diff`: what separates two GGUF models: metadata, types, and each tensor's relative error."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.show import Json, present, start
from llmcli.units import size

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.compare import KeyDifference, Names, TensorDifference
    from quant.container import Header


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("diff")(diff)


def diff(
    left: Annotated[
        str, typer.Argument(metavar="A", help="The reference: a GGUF file or a model that is here.")
    ],
    right: Annotated[str, typer.Argument(metavar="B", help="What is held against it.")],
    all_tensors: Annotated[bool, typer.Option("--all", help="List equal tensors, too.")] = False,
    json: Json = False,
) -> None:
    """Compare two GGUF models: keys, tensors, types, and the relative error of B's values against
    A's.
    """
    from quant import compare, container

    config, ui = start(json)
    headers = [container.read(_file(text, config, ui)) for text in (left, right)]
    keys, names = compare.keys(*headers), compare.names(*headers)
    found = []
    with ui.bar("compare", len(names.both), unit="tensors") as bar:
        for difference in compare.tensors(*headers):
            found.append(difference)
            bar.advance(1)
    if json:
        ui.result(_document(headers, keys, names, found))
        return
    _tell(keys, names, found, ui, all_tensors=all_tensors)


def _file(text: str, config: "Config", ui: "UI") -> Path:
    """The GGUF that a name means; raises where it is not here or not a GGUF."""
    from llmcli.catalog import fetch
    from llmcli.errors import UserError

    path = Path(text).expanduser()
    if path.is_file():
        return path
    model = present(fetch.resolve(text, config), config, ui, text)
    if model is None:
        raise UserError(f"{text} is not here", hint=f"llmcli pull {text}")
    if model.kind != "gguf":
        raise UserError(
            f"{text} is a checkpoint folder", hint=f"llmcli convert {text} makes a GGUF of it"
        )
    return model.path


def _tell(
    keys: "list[KeyDifference]",
    names: "Names",
    found: "list[TensorDifference]",
    ui: "UI",
    *,
    all_tensors: bool,
) -> None:
    if keys:
        ui.table(("key", "A", "B"), [(key.key, key.left or "-", key.right or "-") for key in keys])
        ui.text()
    for side, missing in (("A", names.left), ("B", names.right)):
        for name in missing:
            ui.text(f"only {side} has {name}")
    rows = [
        (
            difference.name,
            _types(difference),
            _bytes(difference),
            "shapes differ"
            if difference.left.shape != difference.right.shape
            else _error(difference),
        )
        for difference in found
        if all_tensors or not difference.same_bytes
    ]
    if rows:
        ui.table(("tensor", "type", "size", "error"), rows, right=("size", "error"))
        ui.text()
    same = sum(difference.same_bytes for difference in found)
    ui.text(
        f"{len(keys)} keys differ; of {len(found)} tensors in both {same} are the same to the bit"
        + (
            f", {len(names.left) + len(names.right)} are in one model only"
            if names.left or names.right
            else ""
        )
    )


def _types(difference: "TensorDifference") -> str:
    left, right = difference.left.type, difference.right.type
    return left if left == right else f"{left} -> {right}"


def _bytes(difference: "TensorDifference") -> str:
    left, right = difference.left.nbytes, difference.right.nbytes
    return size(left) if left == right else f"{size(left)} -> {size(right)}"


def _error(difference: "TensorDifference") -> str:
    if difference.same_bytes:
        return "same bytes"
    return "-" if difference.error is None else f"{difference.error:.3%}"


def _document(
    headers: "list[Header]",
    keys: "list[KeyDifference]",
    names: "Names",
    found: "list[TensorDifference]",
) -> dict[str, Any]:
    sides = [
        {
            "path": str(header.path),
            "file_type": header.file_type,
            "tensor_bytes": header.tensor_bytes,
        }
        for header in headers
    ]
    return {
        "a": sides[0],
        "b": sides[1],
        "keys": [{"key": key.key, "a": key.left, "b": key.right} for key in keys],
        "only_a": list(names.left),
        "only_b": list(names.right),
        "tensors": [
            {
                "name": difference.name,
                "shape": list(difference.left.shape),
                "other_shape": list(difference.right.shape),
                "types": [difference.left.type, difference.right.type],
                "bytes": [difference.left.nbytes, difference.right.nbytes],
                "same_bytes": difference.same_bytes,
                "relative_rmse": difference.error,
            }
            for difference in found
        ],
        "same": not keys
        and not names.left
        and not names.right
        and all(d.same_bytes for d in found),
    }
