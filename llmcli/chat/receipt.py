"""The receipt of a run: what `run --json` adds to its document so that `run --replay` can repeat it,
and the comparison of the two runs.

A receipt has everything that decides the tokens: the prompt, the options of the run and of
sampling, the seed, the model's sha256, the build of llama.cpp and the machine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from llmcli import __version__
from llmcli.chat.chat_session import ChatSession
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.binding import library
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.requests.request import Answer
from quant.json_dataclasses import decode_value, read_json

MAX_RECEIPT_BYTES = 1 << 28  # a token takes some hundred bytes
MAX_SHOWN_CHARACTERS = 100  # of a value in a message; a chat template is long
SECTIONS = ("settings", "build", "machine")  # parts of a document that are compared by key
# The run options whose values in force are in a receipt.
OPTION_NAMES = (
    "ctx_size",
    "threads",
    "threads_batch",
    "batch_size",
    "ubatch_size",
    "gpu_layers",
    "flash_attn",
    "cache_type_k",
    "cache_type_v",
    "reproducible",
    "gemm",
)
FlagValue = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class RecordedToken:
    """A token of an answer."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One of several answers."""

    tokens: tuple[RecordedToken, ...]


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """The model of a run. `sha256`: None if it was not computed."""

    name: str
    path: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """What was asked. `flags`: the values of options of `run`, by name."""

    prompt: str
    flags: Mapping[str, FlagValue]


@dataclass(frozen=True, slots=True)
class RunReceipt:
    """A document of `run --json`, as far as a replay needs it. `tools`: the names of the tools
    that the model could call.
    """

    model: RecordedModel
    tokens: tuple[RecordedToken, ...]
    settings: Mapping[str, FlagValue]
    build: Mapping[str, str]
    machine: Mapping[str, str]
    request: RecordedRequest
    samples: tuple[RecordedSample, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def flags(self) -> dict[str, FlagValue]:
        """The values of all options of the run, by name."""
        return {**self.request.flags, **self.settings}

    @property
    def answers(self) -> tuple[tuple[RecordedToken, ...], ...]:
        """The tokens of each answer."""
        return tuple(sample.tokens for sample in self.samples) or (self.tokens,)


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token at which two answers differ; None where one of them has ended.
    `sample`, `index`: from 0.
    """

    sample: int
    index: int
    recorded: RecordedToken | None
    replayed: RecordedToken | None


@dataclass(frozen=True, slots=True)
class ConditionDifference:
    """Something that decides the tokens and is not as it was. `name`: such as "model.sha256"."""

    name: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """The comparison of a run with its replay."""

    n_tokens: int
    token: TokenDifference | None
    conditions: tuple[ConditionDifference, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return {
            "same": self.token is None,
            "first_difference": asdict(self.token) if self.token else None,
            "differences": [asdict(condition) for condition in self.conditions],
        }

    def describe(self) -> list[str]:
        """Return the comparison as lines of text. The first says whether the tokens are equal."""
        token = self.token
        if token is None:
            lines = [f"replay: the same {self.n_tokens:,} tokens"]
        else:
            sample = f" of sample {token.sample + 1}" if token.sample else ""
            lines = [
                f"replay: token {token.index + 1}{sample} is {_describe_token(token.replayed)} "
                f"instead of {_describe_token(token.recorded)}"
            ]
        lines += [
            f"differs: {condition.name} {_shorten(condition.replayed)} "
            f"instead of {_shorten(condition.recorded)}"
            for condition in self.conditions
        ]
        if not self.conditions:
            lines += ["model, build, machine and settings are the same"] if token else []
        return lines


def build_receipt(
    chat: ChatSession, run_flags: RunFlags, prompt: str, answer: Answer
) -> dict[str, Any]:
    """Return the fields that make the document of a run a receipt."""
    return {
        "settings": {**chat.conversation.sampling.as_dict(), "seed": answer.seed},
        "build": describe_build(),
        "machine": describe_machine(),
        "request": {"prompt": prompt, "flags": _effective_flags(chat, run_flags)},
    }


def describe_build() -> dict[str, str]:
    """Return the versions of llmcli and llama.cpp, the CPU features that llama.cpp uses, and a hash
    of the names and sizes of its libraries.
    """
    files = "".join(f"{path.name} {status.st_size}\n" for path, status in library.library_files())
    return {
        "llmcli": __version__,
        "llama_cpp_python": library.llama_cpp_version(),
        "cpu_features": library.system_info().strip(),
        "libraries": hashlib.sha256(files.encode()).hexdigest()[:16],
    }


def describe_machine() -> dict[str, str]:
    """Return the processor, its cores and the GPUs."""
    gpus = [
        device.description for device in devices.list_devices() if device.kind in devices.GPU_KINDS
    ]
    return {
        "cpu": host.cpu_name(),
        "cores": str(host.core_count()),
        "gpus": ", ".join(gpus) or "none",
    }


def _effective_flags(chat: ChatSession, run_flags: RunFlags) -> dict[str, Any]:
    """Return the options of `run` with the values that were in force, by name. Options that are off
    are left out.
    """
    conversation, runner = chat.conversation, chat.runner
    constraint, options = conversation.constraint, runner.options
    template = runner.template.source if runner.template and run_flags.chat_template else None
    flags: dict[str, Any] = {
        "system": conversation.system or "",
        "chat_template": template,
        "raw": run_flags.raw,
        "no_profile": True,  # its values are among the options
        "predict": -1 if conversation.predict is None else conversation.predict,
        "stops": list(chat.stop_texts),
        "ignore_eos": chat.ignore_eos,
        "endless": chat.endless,
        "reasoning_budget": chat.reasoning_budget,
        "samples": run_flags.samples if run_flags.samples > 1 else None,
        "reasoning": run_flags.reasoning if run_flags.reasoning != "auto" else None,
        "on_full": conversation.on_full if conversation.on_full != "stop" else None,
        "quant": run_flags.quant,
        "draft": runner.drafting.method if runner.drafting.method != "auto" else None,
        "model_draft": str(runner.drafting.file) if runner.drafting.file else None,
        "ngram_draft": runner.ngram_draft,
    }
    if constraint:
        flags |= {
            "grammar" if constraint.kind == "gbnf" else "json_schema": constraint.text,
            "grammar_engine": constraint.engine,
            "jump": constraint.jump,
            "strict_schema": constraint.is_strict,
        }
    if conversation.search.beams > 1:
        flags |= {name: str(value) for name, value in conversation.search.as_dict().items()}
    for name in OPTION_NAMES:
        flags[name] = getattr(options, name)
    return {
        name: value
        for name, value in flags.items()
        if value is not None and value is not False and value != []
    }


def read_receipt(path: Path) -> RunReceipt:
    """Return the receipt in a file that `run --json` has written. Raises UserError if there is
    none.
    """
    hint = "write one with: llmcli run REF PROMPT --json > FILE"
    try:
        return read_json(RunReceipt, path, MAX_RECEIPT_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise UserError(f"{path} is no receipt of a run: {error}", hint=hint) from None


def parse_receipt(document: Mapping[str, Any]) -> RunReceipt:
    """Return the receipt in a document that this process has built."""
    receipt: RunReceipt = decode_value(RunReceipt, json.loads(json.dumps(document)), "")
    return receipt


def compare_runs(recorded: RunReceipt, replayed: RunReceipt) -> ReplayComparison:
    """Return the differences between a run and its replay."""
    return ReplayComparison(
        sum(map(len, recorded.answers)),
        _first_difference(recorded, replayed),
        tuple(_condition_differences(recorded, replayed)),
    )


def _first_difference(recorded: RunReceipt, replayed: RunReceipt) -> TokenDifference | None:
    for sample, tokens in enumerate(zip_longest(recorded.answers, replayed.answers, fillvalue=())):
        for index, (first, second) in enumerate(zip_longest(*tokens)):
            if first is None or second is None or first.id != second.id:
                return TokenDifference(sample, index, first, second)
    return None


def _condition_differences(recorded: RunReceipt, replayed: RunReceipt) -> list[ConditionDifference]:
    pairs: list[tuple[str, Any, Any]] = [
        ("model.sha256", recorded.model.sha256, replayed.model.sha256)
    ]
    tables = [
        (f"{section}.", getattr(recorded, section), getattr(replayed, section))
        for section in SECTIONS
    ]
    tables.append(("", recorded.request.flags, replayed.request.flags))
    for prefix, first, second in tables:
        names = dict.fromkeys((*first, *second))
        pairs += [(prefix + name, first.get(name), second.get(name)) for name in names]
    pairs.append(("prompt", recorded.request.prompt, replayed.request.prompt))
    return [ConditionDifference(*pair) for pair in pairs if pair[1] != pair[2]]


def _describe_token(token: RecordedToken | None) -> str:
    return "the end" if token is None else f"{token.text!r} ({token.id})"


def _shorten(value: Any) -> str:
    """Return a value as text for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
