"""The run options that chat, run, serve and batch share, with llama.cpp's spellings.

The options are added to a command only when it is parsed or its help is printed. The sampling
options are derived from the sampler steps, which need numpy, so `llmcli --help` would start slowly
otherwise.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from llmcli import terminal_status
from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_app import HELP_OPTIONS, PanelCommand
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.placement import PLACEMENT_FLAGS
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.placement_flags import PlacementFlags
from llmcli.model_loader.run_flags import RunFlags
from llmcli.text_input import expand_path, read_text, require_utf8

if TYPE_CHECKING:
    from llmcli.runtime.requests.request import RunOptions

META_KEY = "llmcli.flags"
NEWEST_SESSION = "last"  # the name of the newest session in `chat --resume`
MAX_SAMPLES = 256  # llama.cpp's maximum number of sequences
ON_FULL_MODES = ("stop", "shift", "sinks")
DEFAULT_LOGPROBS = "10"  # the value of `--logprobs` without a number


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line option. `kind`: str, int, bool (a switch) or list (repeatable). `check`
    raises UserError for an invalid value.
    """

    name: str
    spellings: tuple[str, ...]
    kind: type
    help: str
    metavar: str | None = None
    check: Callable[[Any], None] | None = None


def _require(spelling: str, is_valid: Callable[[Any], bool], hint: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not is_valid(value):
            raise UserError(f"{spelling} is {value!r}", hint=hint)

    return check


def _require_text(spelling: str) -> Callable[[Any], None]:
    def check(value: str | list[str]) -> None:
        for text in [value] if isinstance(value, str) else value:
            require_utf8(spelling, text)

    return check


def _check_logprobs(value: int) -> None:
    from llmcli.runtime.sampling.top_logprobs import MAX_TOP_LOGPROBS

    _require(
        "--logprobs",
        lambda count: 0 <= count <= MAX_TOP_LOGPROBS,
        f"--logprobs takes a whole number from 0 to {MAX_TOP_LOGPROBS}",
    )(value)


MODEL_FLAGS = (
    Flag("model", ("-m", "--model", "-hf", "--hf-repo"), str, "the model, in place of REF", "REF"),
    Flag("quant", ("--quant",), str, "quantize the model to this type first", "TYPE"),
    Flag("offline", ("--offline",), bool, "make no network connection"),
    Flag(
        "trust",
        ("--trust",),
        bool,
        "use the model file without first loading it in a separate process",
    ),
    Flag(
        "prompt",
        ("-p", "--prompt"),
        str,
        "the (first) message",
        "TEXT",
        _require_text("--prompt"),
    ),
    Flag("file", ("-f", "--file"), str, "read the (first) message from a file; - is stdin", "FILE"),
    Flag("system", ("-sys", "--system"), str, "system text", "TEXT", _require_text("--system")),
    Flag("system_file", ("-sysf", "--system-prompt-file"), str, "system text in a file", "FILE"),
    Flag(
        "chat_template",
        ("--chat-template",),
        str,
        "chat template to use instead of the model's: a file, Jinja text, or a name such as chatml",
        "TEMPLATE",
        _require_text("--chat-template"),
    ),
    Flag("raw", ("--raw",), bool, "send the prompt as it is, without a chat template"),
    Flag("no_profile", ("--no-profile",), bool, "ignore settings saved by `bench tune`"),
)
ANSWER_FLAGS = (
    Flag(
        "predict",
        ("-n", "--predict", "--n-predict"),
        int,
        "maximum number of tokens in an answer, -1 = no limit",
        "N",
        _require(
            "--predict",
            lambda count: count >= -1,
            "-n takes a whole number of tokens, -1 = no limit",
        ),
    ),
    Flag(
        "stops",
        ("-r", "--reverse-prompt"),
        list,
        "end the answer at this text; repeatable",
        "TEXT",
        _require_text("--reverse-prompt"),
    ),
    Flag("ignore_eos", ("--ignore-eos",), bool, "continue where the model would end the answer"),
    Flag(
        "on_full",
        ("--on-full",),
        str,
        "when the context is full: stop, shift (drop the oldest turns), "
        "sinks (slide a window) [stop]",
        "MODE",
        _require(
            "--on-full",
            lambda mode: mode in ON_FULL_MODES,
            f"--on-full takes one of: {', '.join(ON_FULL_MODES)}",
        ),
    ),
    Flag(
        "reasoning_budget",
        ("--reasoning-budget",),
        int,
        "maximum number of thinking tokens in an answer, whose reply then follows; 0 = no thinking, "
        "-1 = no limit [-1]",
        "N",
        _require(
            "--reasoning-budget",
            lambda count: count >= -1,
            "--reasoning-budget takes a whole number of tokens, -1 = no limit",
        ),
    ),
    Flag("endless", ("--endless",), bool, "continue when the answer only repeats itself"),
    Flag(
        "samples",
        ("--samples",),
        int,
        "number of answers to one prompt, with seeds counting up from --seed [1]",
        "N",
        _require(
            "--samples",
            lambda count: 1 <= count <= MAX_SAMPLES,
            f"--samples takes a whole number from 1 to {MAX_SAMPLES}",
        ),
    ),
)
DISPLAY_FLAGS = (
    Flag(
        "reasoning",
        ("-rea", "--reasoning", "--think"),
        str,
        "let the model think: on, off [auto]",
        "MODE",
    ),
    Flag(
        "markdown",
        ("--markdown",),
        bool,
        "render the answer's Markdown; has no effect without a terminal",
    ),
    Flag(
        "hide_thinking",
        ("--hidethinking",),
        bool,
        "do not show the model's thinking",
    ),
    Flag(
        "logprobs",
        ("--logprobs",),
        int,
        "record each token's N most likely alternatives [10]: "
        "top_logprobs in run --json, /probs in chat",
        "[N]",
        _check_logprobs,
    ),
)
BEAM_FLAGS = (
    Flag(
        "beams",
        ("--beams",),
        str,
        "beam search with K beams; above 1, sampling settings do not apply [1]",
        "K",
    ),
    Flag(
        "length_penalty",
        ("--length-penalty",),
        str,
        "beam search: above 0 favors long answers, below 0 short ones [1]",
        "P",
    ),
    Flag(
        "early_stopping",
        ("--early-stopping",),
        str,
        "beam search: stop when K beams are finished: yes, no, never [no]",
        "WHEN",
    ),
)
CONSTRAINT_FLAGS = (
    Flag(
        "json_schema",
        ("-j", "--json-schema"),
        str,
        "constrain the answer to JSON of this schema; {} allows any JSON",
        "SCHEMA",
    ),
    Flag("json_schema_file", ("-jf", "--json-schema-file"), str, "a JSON schema in a file", "FILE"),
    Flag(
        "strict_schema",
        ("--strict-schema",),
        bool,
        "refuse a schema of which something cannot be enforced, instead of naming it",
    ),
    Flag("grammar", ("--grammar",), str, "constrain the answer to this GBNF grammar", "TEXT"),
    Flag("grammar_file", ("--grammar-file",), str, "a GBNF grammar in a file", "FILE"),
    Flag(
        "grammar_engine",
        ("--grammar-engine",),
        str,
        "grammar engine: llguidance, llama (llama.cpp's own) [llguidance]",
        "NAME",
    ),
    Flag(
        "jump",
        ("--jump",),
        str,
        "insert forced text without sampling it: lossless, fast, off [lossless]",
        "HOW",
    ),
)
DRAFT_FLAGS = (
    Flag(
        "draft",
        ("--draft",),
        str,
        "draft tokens with this method only: ngram (repetitions in the text), pool (earlier "
        "answers), lookahead (the model's parallel predictions), model (-md), mtp (the model's own "
        "prediction layers), eagle3, medusa or blockwise (a file for this model, -md); off: never "
        "[auto: what saves time]",
        "METHOD",
    ),
    Flag(
        "model_draft",
        ("-md", "--model-draft"),
        str,
        "draft tokens with a smaller model that has the same vocabulary, or with the model's EAGLE-3 "
        "draft or draft heads",
        "REF",
    ),
    Flag(
        "ngram_draft",
        ("--ngram-draft",),
        str,
        "draft tokens from repetitions in the text: on, off [auto]",
        "MODE",
    ),
)
RUNTIME_FLAGS = (
    Flag(
        "ctx_size",
        ("-c", "--ctx-size"),
        int,
        "context size in tokens; default: the model's, up to 8192",
        "N",
    ),
    Flag(
        "threads",
        ("-t", "--threads"),
        int,
        "threads; default: as many cores as suit the model",
        "N",
    ),
    Flag(
        "threads_batch",
        ("-tb", "--threads-batch"),
        int,
        "threads for prompts; default: --threads if typed, otherwise the cores",
        "N",
    ),
    Flag("batch_size", ("-b", "--batch-size"), int, "logical batch size in tokens [2048]", "N"),
    Flag("ubatch_size", ("-ub", "--ubatch-size"), int, "physical batch size in tokens [512]", "N"),
    Flag(
        "gpu_layers",
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        str,
        "layers on the GPU: a number, all [auto]",
        "N",
    ),
    Flag("flash_attn", ("-fa", "--flash-attn"), str, "flash attention: on, off [auto]", "MODE"),
    Flag(
        "gemm",
        ("--gemm",),
        str,
        "matrix products: ggml's, or llmcli's own where they are faster [auto]",
        "MODE",
    ),
    Flag("cache_type_k", ("-ctk", "--cache-type-k"), str, "KV cache type of K [f16]", "TYPE"),
    Flag("cache_type_v", ("-ctv", "--cache-type-v"), str, "KV cache type of V [f16]", "TYPE"),
    Flag(
        "reproducible",
        ("--reproducible",),
        bool,
        "bit-identical results regardless of batching: CPU, q8_0 cache",
    ),
)


FIT_FLAGS = (
    Flag(
        "fit",
        ("-fit", "--fit"),
        str,
        "use the nearest settings that fit into memory; off: load regardless",
        "[on|off]",
        _require(
            "--fit",
            lambda mode: mode in ("on", "off"),
            "--fit takes on or off; without a value it means on",
        ),
    ),
)


# The options of each panel of --help. Those of the sampler steps are in the panel SAMPLING.
PANEL_FLAGS: Mapping[str, tuple[str, ...]] = {
    panels.MODEL: ("model", "quant", "offline", "trust", "chat_template", "raw"),
    panels.PROMPT: ("prompt", "file", "system", "system_file"),
    panels.ANSWER: (
        "predict",
        "stops",
        "ignore_eos",
        "endless",
        "samples",
        "reasoning",
        "reasoning_budget",
    ),
    panels.FORMAT: tuple(flag.name for flag in CONSTRAINT_FLAGS),
    panels.SAMPLING: tuple(flag.name for flag in BEAM_FLAGS),
    panels.CONTEXT: ("ctx_size", "on_full", "cache_type_k", "cache_type_v", "fit"),
    panels.PLACEMENT: ("gpu_layers", *(flag.name for flag in PLACEMENT_FLAGS)),
    panels.SPEED: (
        *("threads", "threads_batch", "batch_size", "ubatch_size", "flash_attn"),
        *("gemm", "draft", "model_draft", "ngram_draft", "reproducible", "no_profile"),
    ),
    panels.OUTPUT: ("markdown", "hide_thinking", "logprobs"),
}
PANEL_OF_FLAG = {name: panel for panel, names in PANEL_FLAGS.items() for name in names}
# The options that a receipt may set. No other: it may come from a stranger.
REPLAYED_FLAGS = frozenset(
    (
        *("quant", "chat_template", "raw", "no_profile", "system"),
        *PANEL_FLAGS[panels.ANSWER],
        *("grammar", "json_schema", "grammar_engine", "jump"),
        *PANEL_FLAGS[panels.SAMPLING],
        *("ctx_size", "on_full", "cache_type_k", "cache_type_v"),
        *("threads", "threads_batch", "batch_size", "ubatch_size", "gpu_layers", "flash_attn"),
        *("gemm", "draft", "model_draft", "ngram_draft", "reproducible"),
    )
)
# The options that set a field of RunFlags, where they do not have its name.
FLAGS_OF_FIELD: Mapping[str, tuple[str, ...]] = {
    "constraint": PANEL_FLAGS[panels.FORMAT],
    "search": PANEL_FLAGS[panels.SAMPLING],
    "system": ("system", "system_file"),
}


class RunCommand(PanelCommand):
    """A command with the shared run options. They are added when the arguments are parsed or the
    help is printed. `refused`: names of options that the command refuses; --help leaves them out.
    """

    refused: ClassVar[frozenset[str]] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Options whose value may be left out get their default value first
        (see `_insert_defaults`). The terminal shows at once that llmcli is starting, because
        importing numpy may take seconds on a slow disk.
        """
        words = _insert_defaults(args)
        if not HELP_OPTIONS.intersection(words):
            terminal_status.show("starting …")
        try:
            return super().parse_args(ctx, words)
        except BaseException:
            terminal_status.end()
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command. What it has shown as its status disappears at the end."""
        try:
            return super().invoke(ctx)
        finally:
            terminal_status.end()

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters, followed by the shared run options."""
        names = {param.name for param in self.params}
        if RUNTIME_FLAGS[0].name not in names:
            run_params = _params()
            assert names.isdisjoint(param.name for param in run_params), names
            for param in run_params:
                param.hidden = param.name in self.refused
            self.params += run_params
        return super().get_params(ctx)


def run_command_without(fields: Iterable[str]) -> type[RunCommand]:
    """Return the class of a command that refuses the options of these fields of RunFlags. They are
    still parsed, so that the command can say why it refuses them.
    """
    names = (name for field in fields for name in FLAGS_OF_FIELD.get(field, (field,)))
    return type("RunCommandWithout", (RunCommand,), {"refused": frozenset(names)})


@cache
def run_flags() -> tuple[Flag, ...]:
    """Return all shared run options, including those of the sampler steps."""
    from llmcli.runtime.sampling import sampling_settings

    return (
        *MODEL_FLAGS,
        *ANSWER_FLAGS,
        *CONSTRAINT_FLAGS,
        *DISPLAY_FLAGS,
        *BEAM_FLAGS,
        *DRAFT_FLAGS,
        *RUNTIME_FLAGS,
        *(
            Flag(flag.name, flag.spellings, flag.kind, flag.help, flag.metavar)
            for flag in PLACEMENT_FLAGS
        ),
        *FIT_FLAGS,
        *(
            Flag(
                s.name,
                (*s.flags, "--" + s.name.replace("_", "-")),
                list if s.limits.is_list else str,
                f"{s.help} [{s.format_value(s.default)}]",
                s.limits.metavar,
            )
            for s in sampling_settings().values()
        ),
    )


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two options that cannot be combined, by their keys in ACTIVE. `hint`: "" for the default
    hint.
    """

    first: str
    second: str
    message: str
    hint: str = ""


# for each option, by its spelling in messages: whether it is in effect
ACTIVE: Mapping[str, Callable[[RunFlags], bool]] = {
    "--samples": lambda flags: flags.samples > 1,
    "--beams": lambda flags: flags.search.beams > 1,
    "--logprobs": lambda flags: flags.logprobs > 0,
    "--draft": lambda flags: flags.draft not in ("auto", "off"),
    "--draft off": lambda flags: flags.draft == "off",
    "--draft ngram": lambda flags: flags.draft == "ngram",
    "--draft pool": lambda flags: flags.draft == "pool",
    "--draft lookahead": lambda flags: flags.draft == "lookahead",
    "--draft mtp": lambda flags: flags.draft == "mtp",
    "--draft model": lambda flags: flags.draft == "model",
    "--draft eagle3": lambda flags: flags.draft == "eagle3",
    "--draft medusa": lambda flags: flags.draft == "medusa",
    "--draft blockwise": lambda flags: flags.draft == "blockwise",
    "--ngram-draft off": lambda flags: flags.ngram_draft == "off",
    "--model-draft": lambda flags: flags.model_draft not in (None, "auto", "off"),
    "--ngram-draft": lambda flags: flags.ngram_draft not in ("auto", "off"),
    "--reproducible": lambda flags: flags.options.reproducible,
    "--rpc": lambda flags: flags.placement.rpc is not None,
    "-dev, -sm, -mg, -ts or -ot": lambda flags: flags.placement.moves_work,
    "--reasoning-budget": lambda flags: flags.reasoning_budget not in (None, -1),
    "-p": lambda flags: flags.prompt is not None,
    "-f": lambda flags: flags.file is not None,
    "--raw": lambda flags: flags.raw,
    "--chat-template": lambda flags: flags.chat_template is not None,
    "--jump fast": lambda flags: flags.constraint is not None and flags.constraint.jump == "fast",
}
CONFLICTS = (
    Conflict(
        "--samples",
        "--beams",
        "--samples and --beams cannot be combined: a beam search does not sample",
    ),
    Conflict("--logprobs", "--beams", "--logprobs is not available with --beams"),
    Conflict(
        "--reasoning-budget",
        "--beams",
        "--reasoning-budget does not work with --beams: a beam search draws no single text",
    ),
    *(
        Conflict(draft, several, f"{draft} drafts for one answer and does not work with {several}")
        for draft in ("--model-draft", "--ngram-draft", "--draft")
        for several in ("--beams", "--samples")
    ),
    *(
        Conflict(f"--draft {method}", other, f"--draft {method} does not use {other}")
        for method, other in (
            *(
                (method, other)
                for method in ("off", "pool", "lookahead", "mtp")
                for other in ("--model-draft", "--ngram-draft")
            ),
            ("ngram", "--model-draft"),
            ("ngram", "--ngram-draft off"),
            ("pool", "--ngram-draft off"),
            ("model", "--ngram-draft"),
            ("eagle3", "--ngram-draft"),
            ("medusa", "--ngram-draft"),
            ("blockwise", "--ngram-draft"),
        )
    ),
    Conflict(
        "--reproducible",
        "--rpc",
        "--reproducible cannot use --rpc: it computes on this machine's CPU",
        "leave out --rpc or --reproducible",
    ),
    Conflict(
        "--reproducible",
        "-dev, -sm, -mg, -ts or -ot",
        "--reproducible computes on this machine's processor: "
        "-dev, -sm, -mg, -ts and -ot have no effect",
        "leave them or --reproducible out",
    ),
    Conflict(
        "--draft mtp",
        "--reproducible",
        "--draft mtp does not work with --reproducible",
        "leave out one of them",
    ),
    Conflict("-p", "-f", "-p and -f both set the message"),
    Conflict("--raw", "--chat-template", "--raw uses no chat template"),
    Conflict(
        "--jump fast",
        "--beams",
        "--jump fast does not work with --beams",
        "leave out --jump fast, or --beams",
    ),
)


def parse_run_flags(ctx: typer.Context, recorded: Mapping[str, object] | None = None) -> RunFlags:
    """Return the run options of this command line. They are checked as far as possible without a
    model. `recorded`: values of options in a receipt (`run --replay`), which typed options
    override. Raises UserError, or UsageError for options that cannot be combined.
    """
    from llmcli.commands.options.constraint import take_constraint
    from llmcli.runtime.draft_settings import (
        parse_method,
        parse_ngram_draft,
        require_draft_file,
    )
    from llmcli.runtime.requests.beam_settings import BeamSettings
    from llmcli.runtime.sampling import default_sampling, sampling_settings

    typed: dict[str, Any] = {**_restore(recorded or {}), **ctx.meta.get(META_KEY, {})}
    settings = _pop_all(typed, sampling_settings())
    default_sampling().with_values(settings)
    search = BeamSettings().with_values(_pop_all(typed, (flag.name for flag in BEAM_FLAGS)))
    runtime = _pop_all(typed, (flag.name for flag in RUNTIME_FLAGS))
    options = _build_options(runtime)
    typed["placement"] = PlacementFlags(**_pop_all(typed, (flag.name for flag in PLACEMENT_FLAGS)))
    typed["placement"].parse()
    typed["draft"] = parse_method(typed.get("draft", "auto"))
    typed["ngram_draft"] = parse_ngram_draft(typed.get("ngram_draft", "auto"))
    typed["stops"] = tuple(typed.get("stops", ()))
    for flag in (*MODEL_FLAGS, *ANSWER_FLAGS, *DISPLAY_FLAGS, *FIT_FLAGS):
        if flag.check is not None and flag.name in typed:
            flag.check(typed[flag.name])
    _read_system_file(typed)
    constraint = take_constraint(typed)
    flags = RunFlags(options, settings, search, frozenset(runtime), **typed, constraint=constraint)
    check_conflicts(flags)
    require_draft_file("--draft", flags.draft, flags.model_draft)
    return flags


def _restore(recorded: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of options in a receipt, which may be damaged or written by a stranger.
    Raises UserError if a name or a type is wrong. The values themselves are checked with those that
    were typed.
    """
    from llmcli.runtime.sampling import sampling_settings

    kinds = {flag.name: flag.kind for flag in run_flags() if flag.name in REPLAYED_FLAGS}
    for name, value in recorded.items():
        if type(value) is not kinds.get(name) and name not in sampling_settings():
            raise UserError(
                f"{name} {str(value)[:60]!r} is no option of a run",
                hint="write the receipt again: llmcli run REF PROMPT --json > FILE",
            )
    return dict(recorded)


def check_conflicts(flags: RunFlags) -> None:
    """Raise UsageError for options that cannot be combined."""
    for conflict in CONFLICTS:
        if ACTIVE[conflict.first](flags) and ACTIVE[conflict.second](flags):
            hint = conflict.hint or f"leave out {conflict.first} or {conflict.second}"
            raise UsageError(conflict.message, hint=hint)


def _read_system_file(typed: dict[str, Any]) -> None:
    """Replace the file name of -sysf in `typed` by the system text in the file. As in llama.cpp, a
    line end at the end of the file is removed. Raises UserError.
    """
    file = typed.pop("system_file", None)
    if file is None:
        return
    if "system" in typed:
        raise UsageError("-sys and -sysf both set the system text", hint="leave out one of them")
    typed["system"] = read_text(expand_path(file)).removesuffix("\n")


def _pop_all(typed: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove the named options from `typed`, and return them in the order of the command line."""
    name_set = set(names)
    return {name: typed.pop(name) for name in list(typed) if name in name_set}


def _build_options(typed: Mapping[str, Any]) -> "RunOptions":
    """Return the options of the runtime. Raises UsageError if one of them contradicts
    --reproducible.
    """
    from llmcli.runtime.requests.request import RunOptions

    # llama.cpp's values for "choose automatically"
    automatic = {"ctx_size": (0,), "threads": (0, -1), "threads_batch": (0, -1)}
    options = RunOptions(
        **{name: value for name, value in typed.items() if value not in automatic.get(name, ())}
    )
    return _apply_reproducible(options, typed) if options.reproducible else options


def _apply_reproducible(options: "RunOptions", typed: Mapping[str, Any]) -> "RunOptions":
    """Return `options` with the values that --reproducible requires. Raises UsageError if a typed
    option contradicts one of these values.
    """
    from llmcli.runtime import reproducible

    for flag in RUNTIME_FLAGS:
        needed, chosen = (
            reproducible.REQUIRED_OPTIONS.get(flag.name),
            str(typed.get(flag.name, "auto")).lower(),
        )
        if needed is not None and chosen not in (needed, "auto"):
            raise UsageError(
                f"--reproducible needs {flag.spellings[0]} {needed}, not {chosen}",
                hint=f"leave out {flag.spellings[0]}, or --reproducible",
            )
    return reproducible.with_required_options(options)


def choose_model(ref: str | None, model: str | None) -> str | None:
    """Return the model that REF or -m names; None if neither does. Raises UsageError if both do."""
    if ref and model:
        raise UsageError(f"two models given: {ref} and {model}", hint="leave out one")
    return ref or model


def choose_model_and_argument(
    ref: str | None, argument: str | None, model: str | None
) -> tuple[str | None, str | None]:
    """Return the model and the argument that follows it on the command line.

    If -m names the model, the first word is already this argument. Raises UsageError if both REF
    and -m name a model.
    """
    if not model:
        return ref, argument
    return choose_model(ref if argument is not None else None, model), ref


def _insert_defaults(args: list[str]) -> list[str]:
    """Insert the default values after `--logprobs`, `--resume` and `--fit` where the user left out
    the value.
    """
    words: list[str] = []
    for index, word in enumerate(args):
        words.append(word)
        if word == "--":
            return [*words, *args[index + 1 :]]
        if word == "--logprobs" and not "".join(args[index + 1 : index + 2]).lstrip("+-").isdigit():
            words.append(DEFAULT_LOGPROBS)
        if word in FIT_FLAGS[0].spellings and args[index + 1 : index + 2] not in (["on"], ["off"]):
            words.append("on")
        if word == "--resume" and (index + 1 == len(args) or args[index + 1].startswith("-")):
            words.append(NEWEST_SESSION)
    return words


def _record_value(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    # 0 is a typed value, as in -n 0
    if value is not None and value is not False and value not in ([], ()):
        ctx.meta.setdefault(META_KEY, {})[param.name] = value
    return value


def _params() -> list[Any]:
    """Return the shared run options as Typer parameters. Typer creates them from the signature of a
    function that does nothing.
    """

    def placeholder(**_: Any) -> None: ...

    placeholder.__signature__ = inspect.Signature([_parameter(flag) for flag in run_flags()])  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(placeholder)
    return list(typer.main.get_command(app).params)


def _parameter(flag: Flag) -> inspect.Parameter:
    kind: Any = (
        bool if flag.kind is bool else list[str] | None if flag.kind is list else flag.kind | None
    )
    option = typer.Option(
        False if flag.kind is bool else None,
        *flag.spellings,
        help=flag.help,
        metavar=flag.metavar,
        autocompletion=complete_models if flag.metavar == "REF" else None,
        callback=_record_value,
        expose_value=False,
        show_default=False,
        rich_help_panel=PANEL_OF_FLAG.get(flag.name, panels.SAMPLING),
    )
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind
    )
