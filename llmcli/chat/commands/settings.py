"""/system and /show: what the next answer depends on."""

from collections.abc import Iterable

from llmcli.chat.commands.base import Command
from llmcli.chat.knobs import knobs
from llmcli.chat.knobs.base import Knob
from llmcli.chat.talk import Talk
from llmcli.units import size


def set_system(talk: Talk, rest: str) -> None:
    """Set the system text; alone, show it (`/system ""` removes it)."""
    if not rest:
        talk.ui.text(talk.session.system or "no system text is set; the model's template may have one of its own")
        return
    text = rest[1:-1] if len(rest) > 1 and rest[0] == rest[-1] == '"' else rest
    talk.session.system = text or None
    talk.ui.text("system text set" if text else "system text removed")


def show(talk: Talk, rest: str) -> None:
    """Tell about the model and the settings in effect."""
    runner, header = talk.runner, talk.runner.header
    rows = [
        ("model", talk.name), ("file", str(header.path)), ("architecture", header.architecture),
        ("type", f"{header.file_type}, {header.bits_per_weight:.2f} bits per weight"),
        ("parameters", f"{header.parameters:,}"), ("size", size(header.tensor_bytes)),
        ("context", f"{runner.n_ctx} of {header.context_length or '?'} tokens"),
        ("KV cache", f"K {runner.options.cache_type_k}, V {runner.options.cache_type_v}"),
        ("threads", f"{runner.options.threads}"),
        ("template", "the model's own or yours" if runner.template else "none: the text is continued"),
        ("system", talk.session.system or "-"), ("turns", str(len(talk.session.messages) // 2)),
    ]  # fmt: skip
    talk.ui.table(("", ""), rows)
    listing(talk, knobs().values())


def listing(talk: Talk, wanted: Iterable[Knob]) -> None:
    """A table of knobs: what they are, were, take and mean."""
    rows = [(knob.name, knob.show(talk), knob.default, knob.range, knob.help) for knob in wanted]
    talk.ui.table(("setting", "value", "default", "range", "meaning"), rows, right=("value", "default"))


COMMANDS = (
    Command("show", show),
    Command("system", set_system, "[TEXT]"),
)
