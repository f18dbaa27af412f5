"""`llmcli diff`: compares two GGUF models: metadata, tensor types and relative errors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json
from llmcli.model_loader.installed_model import installed_model
from llmcli.text_input import expand_path
from llmcli.units import format_size

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.diff import KeyDifference, TensorDifference, TensorNames
    from quant.model_file.model_header import ModelHeader


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("diff")(diff)


def diff(
    ref_a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            autocompletion=complete_models,
            help="The reference: a GGUF file or a model on this disk.",
        ),
    ],
    ref_b: Annotated[
        str,
        typer.Argument(
            metavar="B", autocompletion=complete_models, help="The model to compare with A."
        ),
    ],
    all_tensors: Annotated[bool, typer.Option("--all", help="Also list equal tensors.")] = False,
    json: Json = False,
) -> None:
    """Compare the metadata and the tensors of two GGUF models.

    The error of a tensor is that of B's values relative to A's.
    """
    from quant.model_file import read_header
    from quant.model_file.diff import compare_keys, compare_names, compare_tensors

    config, ui = start_command(json)
    headers = [read_header.read_header(_find_gguf(text, config, ui)) for text in (ref_a, ref_b)]
    keys, names = compare_keys(*headers), compare_names(*headers)
    differences = []
    with ui.bar("compare", len(names.common), unit="tensors") as bar:
        for difference in compare_tensors(*headers):
            differences.append(difference)
            bar.advance(1)
    if json:
        ui.result(_build_document(headers, keys, names, differences))
        return
    _print_differences(keys, names, differences, ui, all_tensors=all_tensors)


def _find_gguf(text: str, config: "Config", ui: "UI") -> Path:
    """Return the path of the GGUF that a name refers to. Raises UserError if the model is not on
    this disk or is a checkpoint folder.
    """
    from llmcli.catalog import fetch
    from llmcli.errors import UserError

    path = expand_path(text)
    if path.is_file():
        return path
    model = installed_model(fetch.resolve_ref(text, config), config, ui, text)
    if model is None:
        raise UserError(f"{text} is not on this disk", hint=f"llmcli pull {text}")
    if model.kind != "gguf":
        raise UserError(
            f"{text} is a checkpoint folder", hint=f"to make a GGUF: llmcli convert {text}"
        )
    return model.path


def _print_differences(
    keys: "list[KeyDifference]",
    names: "TensorNames",
    differences: "list[TensorDifference]",
    ui: "UI",
    *,
    all_tensors: bool,
) -> None:
    if keys:
        ui.table(
            ("key", "A", "B"),
            [(key.key, key.left_value or "-", key.right_value or "-") for key in keys],
        )
        ui.text()
    for side, missing in (("A", names.only_left), ("B", names.only_right)):
        for name in missing:
            ui.text(f"only {side} has {name}")
    rows = [
        (
            difference.name,
            _format_types(difference),
            _format_bytes(difference),
            "shapes differ"
            if difference.left_tensor.shape != difference.right_tensor.shape
            else _format_error(difference),
        )
        for difference in differences
        if all_tensors or not difference.same_bytes
    ]
    if rows:
        ui.table(("tensor", "type", "size", "error"), rows, right=("size", "error"))
        ui.text()
    same = sum(difference.same_bytes for difference in differences)
    ui.text(
        f"{len(keys)} keys differ; of {len(differences)} tensors in both, {same} are identical"
        + (
            f", {len(names.only_left) + len(names.only_right)} are in only one model"
            if names.only_left or names.only_right
            else ""
        )
    )


def _format_types(difference: "TensorDifference") -> str:
    left, right = difference.left_tensor.type, difference.right_tensor.type
    return left if left == right else f"{left} -> {right}"


def _format_bytes(difference: "TensorDifference") -> str:
    left, right = difference.left_tensor.nbytes, difference.right_tensor.nbytes
    return format_size(left) if left == right else f"{format_size(left)} -> {format_size(right)}"


def _format_error(difference: "TensorDifference") -> str:
    if difference.same_bytes:
        return "same bytes"
    return "-" if difference.error is None else f"{difference.error:.3%}"


def _build_document(
    headers: "list[ModelHeader]",
    keys: "list[KeyDifference]",
    names: "TensorNames",
    differences: "list[TensorDifference]",
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
        "keys": [{"key": key.key, "a": key.left_value, "b": key.right_value} for key in keys],
        "only_a": list(names.only_left),
        "only_b": list(names.only_right),
        "tensors": [
            {
                "name": difference.name,
                "shape": list(difference.left_tensor.shape),
                "other_shape": list(difference.right_tensor.shape),
                "types": [difference.left_tensor.type, difference.right_tensor.type],
                "bytes": [difference.left_tensor.nbytes, difference.right_tensor.nbytes],
                "same_bytes": difference.same_bytes,
                "relative_rmse": difference.error,
            }
            for difference in differences
        ],
        "same": not keys
        and not names.only_left
        and not names.only_right
        and all(d.same_bytes for d in differences),
    }
