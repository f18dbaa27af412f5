"""/set, /system and /show: what the next answer depends on."""

from collections.abc import Iterable

from llmcli.chat.commands.base import Command
from llmcli.chat.talk import Talk
from llmcli.errors import UserError
from llmcli.runtime import sampling, search
from llmcli.units import size

PREDICT = ("predict", "n_predict", "num_predict", "max_tokens")
FIXED = {
    "ctx_size": "--ctx-size", "num_ctx": "--ctx-size", "threads": "--threads", "num_thread": "--threads",
    "gpu_layers": "--gpu-layers", "num_gpu": "--gpu-layers", "cache_type_k": "-ctk", "cache_type_v": "-ctv",
    "flash_attn": "-fa", "batch_size": "--batch-size", "ubatch_size": "--ubatch-size", "stop": "--reverse-prompt",
}  # fmt: skip


def change(talk: Talk, rest: str) -> None:
    """Change a setting; alone, list all of them.

    `/set parameter NAME VALUE` and `/set system TEXT` mean what they mean in ollama.
    """
    words = rest.split(None, 1)
    if words and words[0] == "parameter":
        words = words[1].split(None, 1) if len(words) > 1 else []
    if not words:
        _list(talk)
        return
    name, value = words[0], words[1].strip() if len(words) > 1 else None
    key = name.lower().replace("-", "_")
    if key == "system":
        set_system(talk, value or "")
    elif key in FIXED:
        raise UserError(f"{name} is fixed while the model is loaded", hint=f"leave, and start with {FIXED[key]}")
    elif value is None:
        _list(talk, key)
    elif key in search.PARSED:
        _search(talk, key, value)
    elif key in PREDICT:
        talk.session.predict = predict(value)
        talk.ui.text(f"predict = {_predict(talk)}")
    else:
        talk.session.sampling = talk.session.sampling.with_values({name: value})
        found = sampling.find(name)
        talk.ui.text(f"{found.name} = {found.show(talk.session.sampling[found.name])}")


def predict(value: str) -> int | None:
    """A limit of tokens as people write it; -1 is none. Raises UserError."""
    try:
        number = int(value)
    except ValueError:
        number = -2
    if number < -1:
        raise UserError(f"predict is {value!r}", hint="predict takes a whole number of tokens, -1 = no limit")
    return None if number == -1 else number


def _search(talk: Talk, key: str, value: str) -> None:
    """Change a setting of the beam search; the sequences that beams take were made with the context."""
    wanted, most = talk.session.search.with_values({key: value}), talk.runner.context.n_seq_max
    if wanted.beams > most:
        raise UserError(
            f"{wanted.beams} beams: this model was loaded for {most}",
            hint=f"leave, and start with --beams {wanted.beams}",
        )
    talk.session.search = wanted
    talk.ui.text(f"{key} = {_plain(wanted.as_dict()[key])}")


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
    _list(talk)


def _list(talk: Talk, name: str = "") -> None:
    values = talk.session.sampling.as_dict()
    ours = name in PREDICT or name in search.HELP
    wanted = [sampling.find(name)] if name and not ours else list(sampling.settings().values())
    rows = [(s.name, s.show(values[s.name]), s.show(s.default), f"{s.limits}", s.help) for s in wanted]
    if ours:
        rows = []
    if not name or name in PREDICT:
        rows.append(("predict", _predict(talk), "-1", "from -1 up", "the most tokens of an answer, -1 = no limit"))
    chosen = talk.session.search.as_dict()
    rows += [(key, _plain(chosen[key]), *words) for key, words in search.HELP.items() if name in ("", key)]
    talk.ui.table(("setting", "value", "default", "range", "meaning"), rows, right=("value", "default"))


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.10g}"


def _predict(talk: Talk) -> str:
    return str(-1 if talk.session.predict is None else talk.session.predict)


def _names(talk: Talk) -> Iterable[str]:
    return [*sampling.settings(), *search.PARSED, "predict", "system"]


COMMANDS = (
    Command("set", change, "[NAME [VALUE]]", completions=_names),
    Command("show", show),
    Command("system", set_system, "[TEXT]"),
)
