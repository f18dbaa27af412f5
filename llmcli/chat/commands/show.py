"""/show: what is in the model, and what it is told."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.commands.system import list_settings
from llmcli.errors import UserError
from llmcli.units import size
from quant.gguf.header import Array

LICENSE = ("license", "license.name", "license.link")


def show(talk: Talk, rest: str) -> None:
    """Tell about the model and the settings in effect.

    `/show info`, `template`, `parameters`, `license` and `system` tell one thing, as in ollama:
    what is in the file, its chat template, the settings, its licence, the system text.
    """
    part = rest.lower()
    if part == "":
        _in_short(talk)
        list_settings(talk)
    elif part in PARTS:
        PARTS[part](talk)
    else:
        raise UserError(
            f"/show does not know {rest!r}", hint=f"/show takes one of: {' '.join(PARTS)}"
        )


def _in_short(talk: Talk) -> None:
    runner, header = talk.runner, talk.runner.header
    rows = [
        ("model", talk.name),
        ("file", str(header.path)),
        ("architecture", header.architecture),
        ("type", f"{header.file_type}, {header.bits_per_weight:.2f} bits per weight"),
        ("parameters", f"{header.parameters:,}"),
        ("size", size(header.tensor_bytes)),
        ("context", f"{runner.n_ctx} of {header.context_length or '?'} tokens"),
        ("KV cache", f"K {runner.options.cache_type_k}, V {runner.options.cache_type_v}"),
        ("threads", f"{runner.options.threads}"),
        (
            "template",
            "the model's own or yours" if runner.template else "none: the text is continued",
        ),
        ("system", talk.session.system or "-"),
        ("turns", str(len(talk.session.messages) // 2)),
    ]
    talk.ui.table(("", ""), rows)


def _info(talk: Talk) -> None:
    """What the file says of itself; arrays (the vocabulary) by their length."""
    header = talk.runner.header
    rows = [
        ("file", str(header.path)),
        ("type", header.file_type),
        ("tensors", f"{len(header.tensors):,}"),
    ]
    for field in header.fields:
        if (
            field.key.removeprefix("general.") not in LICENSE
            and field.key != "tokenizer.chat_template"
        ):
            value = field.value
            told = f"{value.count:,} values" if isinstance(value, Array) else str(value)
            rows.append((field.key, " ".join(told.split())))
    talk.ui.table(("", ""), rows)


def _template(talk: Talk) -> None:
    template = talk.runner.template
    talk.ui.text(template.source if template else "there is no template: the text is continued")


def _license(talk: Talk) -> None:
    metadata = talk.runner.header.metadata
    told = [str(metadata[key]) for word in LICENSE if (key := f"general.{word}") in metadata]
    talk.ui.text("\n".join(told) or "the file does not name its licence")


def _system(talk: Talk) -> None:
    talk.ui.text(
        talk.session.system or "no system text is set; the model's template may have one of its own"
    )


PARTS = {
    "info": _info,
    "template": _template,
    "parameters": list_settings,
    "license": _license,
    "system": _system,
}


def _parts(talk: Talk) -> Iterable[str]:
    return PARTS


COMMANDS = (
    Command(
        "show",
        show,
        "[info|template|parameters|license|system]",
        completions=_parts,
        group="model and settings",
    ),
)
