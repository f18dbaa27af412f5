"""The run options that chat, run, serve and batch share, in llama.cpp's spellings.

The options are added to a command lazily: `llmcli --help` builds every command, and the sampling
options are derived from the sampler steps, which need numpy.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from llmcli.commands.options.rpc import HELP_RPC, HELP_SPLIT
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.run_flags import RunFlags
from llmcli.text_input import require_utf8

if TYPE_CHECKING:
    from llmcli.runtime.requests.beam_settings import BeamSettings
    from llmcli.runtime.requests.request import RunOptions

META_KEY = "llmcli.flags"
NEWEST_SESSION = "last"  # the name that `chat --resume` gives the newest session
MAX_SAMPLES = 256  # llama.cpp's maximum number of sequences
ON_FULL_MODES = ("stop", "shift", "sinks")
DEFAULT_LOGPROBS = "10"  # the value of `--logprobs` without a number


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `kind` is str, int, bool (a switch) or list (repeatable)."""

    name: str
    spellings: tuple[str, ...]
    kind: type
    help: str
    metavar: str | None = None


MODEL_FLAGS = (
    Flag("model", ("-m", "--model", "-hf", "--hf-repo"), str, "the model, in place of REF", "REF"),
    Flag("quant", ("--quant",), str, "quantize the model to this type first", "TYPE"),
    Flag("offline", ("--offline",), bool, "make no network connection"),
    Flag("prompt", ("-p", "--prompt"), str, "the (first) message", "TEXT"),
    Flag("file", ("-f", "--file"), str, "read the (first) message from a file", "FILE"),
    Flag("system", ("-sys", "--system"), str, "system text", "TEXT"),
    Flag(
        "chat_template",
        ("--chat-template",),
        str,
        "chat template to use instead of the model's: a file or Jinja text",
        "TEMPLATE",
    ),
    Flag("raw", ("--raw",), bool, "send the prompt as it is, without a chat template"),
    Flag("no_profile", ("--no-profile",), bool, "ignore settings saved by `bench tune`"),
    Flag("rpc", ("--rpc",), str, HELP_RPC, "HOST:PORT,…"),
    Flag("tensor_split", ("-ts", "--tensor-split"), str, HELP_SPLIT, "N,N,…"),
)
ANSWER_FLAGS = (
    Flag(
        "predict",
        ("-n", "--predict", "--n-predict"),
        int,
        "maximum number of tokens in an answer, -1 = no limit",
        "N",
    ),
    Flag(
        "stops",
        ("-r", "--reverse-prompt"),
        list,
        "end the answer at this text; repeatable",
        "TEXT",
    ),
    Flag("ignore_eos", ("--ignore-eos",), bool, "continue where the model would end the answer"),
    Flag(
        "on_full",
        ("--on-full",),
        str,
        "when the context is full: stop, shift (drop the oldest turns), "
        "sinks (slide a window) [stop]",
        "MODE",
    ),
    Flag("endless", ("--endless",), bool, "continue when the answer only repeats itself"),
    Flag(
        "samples",
        ("--samples",),
        int,
        "run: number of answers to one prompt, with seeds counting up from --seed [1]",
        "N",
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
        "model_draft",
        ("-md", "--model-draft"),
        str,
        "draft tokens with a smaller model that has the same vocabulary",
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
    Flag("threads", ("-t", "--threads"), int, "threads; default: the physical cores", "N"),
    Flag(
        "threads_batch",
        ("-tb", "--threads-batch"),
        int,
        "threads for prompts; default: same as --threads",
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
        "matrix products with many rows: ggml, or bfloat16 where that is faster [auto]",
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
    ),
)


class RunCommand(TyperCommand):
    """A command with the shared run options, which are added when its arguments are parsed or its
    help is printed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; `--logprobs` without a value means ten, `--resume` without one the
        newest session.
        """
        return super().parse_args(ctx, _insert_defaults(args))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters, followed by the shared run options."""
        names = {param.name for param in self.params}
        if RUNTIME_FLAGS[0].name not in names:
            made = _params()
            assert names.isdisjoint(param.name for param in made), names
            self.params += made
        return super().get_params(ctx)


@cache
def run_flags() -> tuple[Flag, ...]:
    """Return every shared run option, including those that the sampler steps define."""
    from llmcli.runtime.sampling import sampling_settings

    return (
        *MODEL_FLAGS,
        *ANSWER_FLAGS,
        *CONSTRAINT_FLAGS,
        *DISPLAY_FLAGS,
        *BEAM_FLAGS,
        *DRAFT_FLAGS,
        *RUNTIME_FLAGS,
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


def parse_run_flags(ctx: typer.Context) -> RunFlags:
    """Return the run options of this command line, checked as far as possible without a model.

    Raises UserError or UsageError.
    """
    from llmcli.commands.options.constraint import take_constraint
    from llmcli.runtime.requests.beam_settings import BeamSettings
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.runtime.sampling import default_sampling, sampling_settings
    from llmcli.runtime.sampling.top_logprobs import MAX_TOP_LOGPROBS as MOST_LOGPROBS
    from llmcli.runtime.speculation import parse_ngram_draft

    typed: dict[str, Any] = dict(ctx.meta.get(META_KEY, {}))
    chosen = {name: typed.pop(name) for name in list(typed) if name in sampling_settings()}
    default_sampling().with_values(chosen)
    search = BeamSettings().with_values(
        {flag.name: typed.pop(flag.name) for flag in BEAM_FLAGS if flag.name in typed}
    )
    run = {flag.name: typed.pop(flag.name) for flag in RUNTIME_FLAGS if flag.name in typed}
    # llama.cpp's values for "choose automatically"
    automatic = {"ctx_size": (0,), "threads": (0, -1), "threads_batch": (0, -1)}
    options = RunOptions(
        **{name: value for name, value in run.items() if value not in automatic.get(name, ())}
    )
    if options.reproducible:
        options = _apply_reproducible(options, run)
    if typed.get("predict", -1) < -1:
        raise UserError(
            f"--predict is {typed['predict']}",
            hint="-n takes a whole number of tokens, -1 = no limit",
        )
    if not 1 <= typed.get("samples", 1) <= MAX_SAMPLES:
        raise UserError(
            f"--samples is {typed['samples']}",
            hint=f"--samples takes a whole number from 1 to {MAX_SAMPLES}",
        )
    if typed.get("samples", 1) > 1 and search.beams > 1:
        raise UsageError(
            "--samples and --beams cannot be combined: a beam search does not sample",
            hint="leave out --samples or --beams",
        )
    if typed.get("logprobs") and search.beams > 1:
        raise UsageError(
            "--logprobs is not available with --beams", hint="leave out --logprobs or --beams"
        )
    typed["ngram_draft"] = parse_ngram_draft(typed.get("ngram_draft", "auto"))
    _refuse_parallel_drafts(typed, search)
    if typed.get("on_full", "stop") not in ON_FULL_MODES:
        raise UserError(
            f"--on-full is {typed['on_full']!r}",
            hint=f"--on-full takes one of: {', '.join(ON_FULL_MODES)}",
        )
    if typed.get("fit", "on") not in ("on", "off"):
        raise UserError(
            f"--fit is {typed['fit']!r}", hint="--fit takes on or off; without a value it means on"
        )
    if not 0 <= typed.get("logprobs", 0) <= MOST_LOGPROBS:
        raise UserError(
            f"--logprobs is {typed['logprobs']}",
            hint=f"--logprobs takes a whole number from 0 to {MOST_LOGPROBS}",
        )
    if options.reproducible and "rpc" in typed:
        raise UsageError(
            "--reproducible cannot use --rpc: it computes on this machine's CPU",
            hint="leave out --rpc or --reproducible",
        )
    if "prompt" in typed and "file" in typed:
        raise UsageError("-p and -f both set the message", hint="leave out -p or -f")
    if typed.get("raw") and "chat_template" in typed:
        raise UsageError("--raw uses no chat template", hint="leave out --raw or --chat-template")
    guide = take_constraint(typed)
    if guide and guide.jump == "fast" and search.beams > 1:
        raise UsageError(
            "--jump fast does not work with --beams", hint="leave out --jump fast, or --beams"
        )
    for name, what in (
        ("prompt", "--prompt"),
        ("system", "--system"),
        ("chat_template", "--chat-template"),
    ):
        require_utf8(what, typed.get(name, ""))
    for text in typed.get("stops", ()):
        require_utf8("--reverse-prompt", text)
    typed["stops"] = tuple(typed.get("stops", ()))
    return RunFlags(options, chosen, search, frozenset(run), **typed, constraint=guide)


def _apply_reproducible(options: "RunOptions", typed: Mapping[str, Any]) -> "RunOptions":
    """Return `options` with what --reproducible requires; raise UsageError if a typed option
    contradicts it.
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


def _refuse_parallel_drafts(typed: Mapping[str, Any], search: "BeamSettings") -> None:
    """Raise UsageError if drafting was requested for several answers at once."""
    asked = [
        flag
        for flag in ("model_draft", "ngram_draft")
        if typed.get(flag) not in (None, "auto", "off")
    ]
    if asked and (typed.get("samples", 1) > 1 or search.beams > 1):
        other = "--beams" if search.beams > 1 else "--samples"
        flag = "--" + asked[0].replace("_", "-")
        raise UsageError(
            f"{flag} drafts for one answer and does not work with {other}",
            hint=f"leave out {flag} or {other}",
        )


def choose_model(ref: str | None, model: str | None) -> str | None:
    """Return the model of REF or of -m; raises UsageError if both name one."""
    if ref and model:
        raise UsageError(f"two models given: {ref} and {model}", hint="leave out one")
    return ref or model


def choose_model_and_argument(
    ref: str | None, argument: str | None, model: str | None
) -> tuple[str | None, str | None]:
    """Return the model and the argument behind it, which comes first if -m names the model.

    Raises UsageError if both name a model.
    """
    if not model:
        return ref, argument
    return choose_model(ref if argument is not None else None, model), ref


def _insert_defaults(args: list[str]) -> list[str]:
    """Insert the default values of options whose value may be left out: `--logprobs`, `--resume`,
    `--fit`.
    """
    out: list[str] = []
    for index, word in enumerate(args):
        out.append(word)
        if word == "--":
            return [*out, *args[index + 1 :]]
        if word == "--logprobs" and not "".join(args[index + 1 : index + 2]).lstrip("+-").isdigit():
            out.append(DEFAULT_LOGPROBS)
        if word in FIT_FLAGS[0].spellings and args[index + 1 : index + 2] not in (["on"], ["off"]):
            out.append("on")
        if word == "--resume" and (index + 1 == len(args) or args[index + 1].startswith("-")):
            out.append(NEWEST_SESSION)
    return out


def _record_value(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    if value is not None and value is not False and value not in ([], ()):  # 0 is a value: -n 0
        ctx.meta.setdefault(META_KEY, {})[param.name] = value
    return value


def _params() -> list[Any]:
    """Return the shared run options as Typer parameters, built from a signature."""

    def hollow(**_: Any) -> None: ...

    hollow.__signature__ = inspect.Signature([_parameter(flag) for flag in run_flags()])  # type: ignore[attr-defined]
    made = typer.Typer(add_completion=False)
    made.command()(hollow)
    return list(typer.main.get_command(made).params)


def _parameter(flag: Flag) -> inspect.Parameter:
    kind: Any = (
        bool if flag.kind is bool else list[str] | None if flag.kind is list else flag.kind | None
    )
    option = typer.Option(
        False if flag.kind is bool else None,
        *flag.spellings,
        help=flag.help,
        metavar=flag.metavar,
        callback=_record_value,
        expose_value=False,
        show_default=False,
    )
    return inspect.Parameter(
        flag.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind
    )
