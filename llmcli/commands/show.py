"""`llmcli show`: what is in a model, or where it would come from; and what its template does.

Also the small things that all commands about models share: how one is named in JSON, how it is
counted.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llmcli.catalog.fetch import Model, Wanted
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.certificate import Certificate
    from quant.container import Header

Ref = Annotated[
    str, typer.Argument(metavar="REF", help="catalog name, org/repo[:QUANT], file or folder")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("show")(show)


def start(
    json: bool = False, offline: bool = False, allow_pickle: bool = False
) -> "tuple[Config, UI]":
    """The configuration and the sink of one command."""
    from llmcli import config
    from llmcli.ui import UI

    loaded = config.load()
    loaded = replace(loaded, offline=loaded.offline or offline, allow_pickle=allow_pickle)
    return loaded, UI(json=json, color=loaded.color)


def show(
    ref: Ref,
    template: Annotated[
        bool,
        typer.Option("--template", help="Render probe conversations and check the chat template."),
    ] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor: name, shape, type, size.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Hold all bytes against the certificate that the file carries."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show what is in a model, or where it would come from; and the certificate that `quantize
    --verify` gave it.
    """
    from llmcli.catalog import facts, fetch
    from llmcli.commands import certified
    from quant import container

    config, ui = start(json)
    wanted = fetch.resolve(ref, config)
    model = present(wanted, config, ui, ref)
    if model is None:
        _show_absent(wanted, ui)
        return
    if template:
        _show_template(model, ui)
        return
    header = container.read(model.path) if model.kind == "gguf" else None
    known = facts.of_header(header) if header else facts.checkpoint(model.path)
    listed = facts.tensors(header) if header and tensors else []
    held = _certificate(header, ui) if header else None
    _refuse_check(model, check and held is None)
    doubts = certified.doubts(header, held, check, ui) if header and held else ()
    if json:
        told = certified.document(held, doubts, check) if held else None
        ui.result(
            {
                **identity(model),
                **known,
                "certificate": told,
                **({"tensors": listed} if tensors else {}),
            }
        )
        _fail(model, doubts, check)
        return
    _show_model(model, known, ui)
    if header:
        _show_header(header, ui)
    if header and held:
        certified.show(held, header, doubts, check, ui)
    if listed:
        _show_tensors(listed, ui)
    licence = str(header.metadata.get("general.license", "")) if header else ""
    _section(
        "License",
        {"license": licence or (model.entry.license if model.entry else "") or "not stated"},
        ui,
    )
    _fail(model, doubts, check)


def _certificate(header: "Header", ui: "UI") -> "Certificate | None":
    """What the file carries; what cannot be read is told, and is none."""
    from quant import certificate
    from quant.errors import Refusal

    try:
        return certificate.read(header)
    except Refusal as error:
        ui.warn(str(error))
        return None


def _refuse_check(model: "Model", wanted: bool) -> None:
    """Raise UserError where there is nothing to check against."""
    from llmcli.errors import UserError

    if wanted:
        raise UserError(
            f"{model.name} carries no certificate",
            hint="llmcli quantize SRC -o FILE --verify writes one",
        )


def _fail(model: "Model", doubts: tuple[str, ...], check: bool) -> None:
    """The verdict of --check is the command's own."""
    from llmcli.errors import UserError

    if check and doubts:
        raise UserError(
            f"the certificate does not belong to {model.name}: {'; '.join(doubts)}",
            hint="make the file again, or verify it again: llmcli quantize SRC -o FILE --verify",
        )


def _show_template(model: "Model", ui: "UI") -> None:
    """What each probe conversation becomes, and what is wrong with the template."""
    from llmcli.errors import UserError

    if model.kind != "gguf":
        raise UserError(
            f"{model.name} is a checkpoint folder",
            hint=f"llmcli pull {model.name} --quant q4_k_m makes a GGUF",
        )
    from llmcli.runtime.doctor import template_report

    report = template_report(model.path)
    if ui.json:
        ui.result({**identity(model), "probes": report.probes, "warnings": list(report.warnings)})
        return
    for name, text in report.probes.items():
        ui.text(f"--- {name}")
        ui.text(text)
    for warning in report.warnings:
        ui.warn(warning)
    if not report.warnings:
        ui.text("the template passes: one BOS, and every turn ends where generation stops")


def identity(model: "Model") -> dict[str, Any]:
    """A model as `pull --json` names it."""
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.bytes,
        "sha256": model.sha256 or None,
        "source": model.source,
        "revision": model.revision,
    }


def count(number: int | None) -> str:
    """Parameters as people say them: 134515008 -> 134.5M."""
    if not number:
        return "-"
    for step, letter in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")):
        if number >= step:
            return f"{number / step:.1f}{letter}"
    return str(number)


def present(wanted: "Wanted", config: "Config", ui: "UI", ref: str) -> "Model | None":
    """The model if it is here; NAME:TYPE is the quantized one if that is."""
    from pathlib import Path

    from llmcli.catalog import fetch, store, straight

    model = fetch.find(ref, config, ui) or straight.made(ref, None, config, ui)
    if (
        model is None
        or not wanted.ref.quant
        or not (made := store.load_derived(config, model, wanted.ref.quant))
    ):
        return model
    return replace(
        model,
        name=made.name,
        path=Path(made.path),
        kind="gguf",
        bytes=made.bytes,
        sha256=made.sha256,
        source=made.source,
    )


def _show_absent(wanted: "Wanted", ui: "UI") -> None:
    from llmcli.catalog import facts
    from llmcli.units import size

    entry = wanted.entry
    first = wanted.sources[0]
    if ui.json:
        named = {
            "name": wanted.ref.full,
            "path": None,
            "bytes": first.bytes or None,
            "sha256": first.sha256 or None,
            "source": first.label,
            "revision": None,
        }
        ui.result({**named, **facts.nothing(), "certificate": None})
        return
    about = {
        "name": wanted.ref.full,
        "description": entry.description if entry else "",
        "here": "no",
    }
    about |= {"size": size(first.bytes)} if first.bytes else {}
    _section("Model", about, ui)
    sources = {
        str(number): spec.label + (f" ({spec.note})" if spec.note else "")
        for number, spec in enumerate(wanted.sources, 1)
    }
    _section("Sources", sources, ui)
    if entry and entry.license:
        _section("License", {"license": entry.license}, ui)
    ui.text(f"fetch it: llmcli pull {wanted.ref.full}")


def _show_model(model: "Model", known: dict[str, Any], ui: "UI") -> None:
    from llmcli.units import size

    _section(
        "Model",
        {
            "name": model.name,
            "description": model.entry.description if model.entry else "",
            "architecture": known["architecture"],
            "parameters": count(known["parameters"]),
            "context length": str(known["context_length"]),
            "file type": f"{known['file_type']} ({known['bits_per_weight']:.2f} bits per weight)",
            "size": f"{size(model.bytes)} ({model.bytes} bytes)",
            "path": str(model.path),
            "source": model.source + (f" at {model.revision}" if model.revision else ""),
            "sha256": model.sha256,
            "becomes": model.quant or "",
            "system": model.system or "",
            "settings": " ".join(f"{name}={value}" for name, value in model.settings.items()),
        },
        ui,
    )
    ui.text("Types")
    rows = [
        (f"  {name}", str(row["tensors"]), size(row["bytes"]))
        for name, row in known["types"].items()
    ]
    ui.table(("  type", "tensors", "size"), rows, right=("tensors", "size"))
    ui.text()
    _show_roles(known["roles"], ui)


def _show_roles(roles: dict[str, Any], ui: "UI") -> None:
    """Where the bytes are: what each kind of tensor is stored as, over all blocks."""
    from llmcli.units import size

    if not roles:
        return
    ui.text("Roles")
    rows = [
        (
            f"  {name}",
            " ".join(f"{kind}\u00d7{number}" for kind, number in row["types"].items()),
            count(row["parameters"]),
            size(row["bytes"]),
            f"{row['bytes'] * 8 / row['parameters']:.2f}",
        )
        for name, row in sorted(roles.items(), key=lambda item: -item[1]["bytes"])
    ]
    columns = ("  role", "types", "parameters", "size", "bits/weight")
    ui.table(columns, rows, right=columns[2:])
    ui.text()


def _show_tensors(listed: list[dict[str, Any]], ui: "UI") -> None:
    from llmcli.units import size

    ui.text("Tensors")
    rows = [
        (f"  {row['name']}", " x ".join(map(str, row["shape"])), row["type"], size(row["bytes"]))
        for row in listed
    ]
    ui.table(("  tensor", "shape", "type", "size"), rows, right=("size",))
    ui.text()


def _show_header(header: Any, ui: "UI") -> None:
    """The tokenizer's section: what decides how text becomes tokens."""
    from quant.container import Array

    data = header.metadata
    tokens = data.get("tokenizer.ggml.tokens")
    numbers = {name: data.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    _section(
        "Tokenizer",
        {
            "model": header.tokenizer,
            "pre": str(data.get("tokenizer.ggml.pre", "")),
            "vocabulary": str(tokens.count) if isinstance(tokens, Array) else "",
            **{f"{name} token": str(value) for name, value in numbers.items() if value is not None},
            "chat template": "yes"
            if header.has_template
            else "no: a base model, it continues text",
        },
        ui,
    )


def _section(title: str, rows: dict[str, str], ui: "UI") -> None:
    ui.text(title)
    for name, value in rows.items():
        if value:
            ui.text(f"  {name:<16}{' '.join(value.split())}")
    ui.text()
