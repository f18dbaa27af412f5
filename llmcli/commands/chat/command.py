"""`llmcli chat` and `llmcli run`: open a model for a conversation, or for the answer to one
prompt.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli import text_input
from llmcli.chat.tools.tool_request import ToolRequest
from llmcli.commands.chat import server_chat
from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import DEFAULT_MODEL, REF_HELP
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.run import (
    META_KEY,
    RunCommand,
    choose_model,
    choose_model_and_argument,
    parse_run_flags,
    run_command_without,
)
from llmcli.commands.options.tools import ToolOptions, list_tool_flags
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.batch.skeleton_run import SkeletonResult
    from llmcli.chat.chat_session import ChatSession
    from llmcli.chat.conversation.conversation import Conversation
    from llmcli.chat.conversation.history import HistoryItem
    from llmcli.chat.receipt import ReplayComparison, RunReceipt
    from llmcli.config import Config
    from llmcli.runtime.requests.request import Answer
    from llmcli.ui import UI


NO_TOOLS = ToolRequest()


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("chat", cls=run_command_without(["samples"]))(with_option_groups(chat))
    app.command("run", cls=RunCommand)(with_option_groups(run))


def chat(
    ctx: typer.Context,
    ref: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            autocompletion=complete_models,
            help=f"{REF_HELP} Default: {DEFAULT_MODEL}",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME]",
            help="Resume a saved chat or an earlier session; without a name the last one.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Chat with a model of this server with OpenAI's API; --model names it.",
            rich_help_panel=panels.NETWORK,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="API key of the server; also LLMCLI_API_KEY.",
            rich_help_panel=panels.NETWORK,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="API key in a file.", rich_help_panel=panels.NETWORK),
    ] = None,
    cacert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of the CA that signed the server.",
            rich_help_panel=panels.NETWORK,
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Do not verify the server's TLS certificate.",
            rich_help_panel=panels.NETWORK,
        ),
    ] = False,
    tools: ToolOptions = NO_TOOLS,
) -> None:
    """Chat with a model. Input from a pipe is read as one message per line."""
    connection = {
        "--api-key": api_key,
        "--api-key-file": api_key_file,
        "--cacert": cacert,
        "--insecure": insecure,
    }
    if server is None and (typed := [flag for flag, value in connection.items() if value]):
        raise UsageError(f"{typed[0]} applies to --server", hint="add --server URL")
    run_flags = parse_run_flags(ctx)
    if server is None:
        _check_tools(tools, run_flags)
    else:
        server_chat.check_run_flags(ctx.meta.get(META_KEY, {}))
        server_chat.check_tools(tools)
    ref = choose_model(ref, run_flags.model)
    if run_flags.samples > 1:
        raise UsageError(
            "chat gives one answer at a time",
            hint="for several: llmcli run REF PROMPT --samples N",
        )
    config, ui = start_command(offline=run_flags.offline)
    item = _find_session(resume, config) if resume else None
    stored = item.read_conversation() if item else None
    if server is not None:
        options = server_chat.ServerOptions(server, api_key, api_key_file, cacert, insecure)
        earlier_model = stored.model if stored else ""
        with server_chat.open_server_chat(
            options, ref, earlier_model, run_flags, config, ui
        ) as chat_session:
            is_complete = _converse(chat_session, _read_flags_prompt(run_flags), run_flags, item)
        if not is_complete:
            raise typer.Exit(1)
        return
    if item and not ref and stored and stored.server:
        raise UserError(
            f"{item.name} used {stored.model} of the server {stored.server}",
            hint=f"llmcli chat --server {stored.server} --resume {item.name}, "
            f"or another model: llmcli chat REF --resume {item.name}",
        )
    if item and not ref and stored and (ref := stored.model):
        ui.note(
            f"{item.name}: resumed with {ref} (with another model: "
            f"llmcli chat REF --resume {item.name})"
        )
    with _open_chat(
        ref or DEFAULT_MODEL, run_flags, config, ui, is_chat=True, tools=tools
    ) as chat_session:
        is_complete = _converse(chat_session, _read_flags_prompt(run_flags), run_flags, item)
    if not is_complete:
        raise typer.Exit(1)


def run(
    ctx: typer.Context,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", autocompletion=complete_models, help=REF_HELP)
    ] = None,
    text: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; without one it is read from stdin."),
    ] = None,
    skeleton: Annotated[
        bool,
        typer.Option(
            "--skeleton",
            help="Skeleton-of-Thought: an outline, then its points in parallel.",
            rich_help_panel=panels.ANSWER,
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON document, with the time of every token.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = False,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Repeat the run of a --json document, and compare the tokens.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = None,
    tools: ToolOptions = NO_TOOLS,
) -> None:
    """Answer one prompt and exit.

    Without a prompt, on a terminal, opens the chat.
    """
    if (tool_flags := list_tool_flags(tools)) and (skeleton or replay is not None):
        raise UsageError(
            f"{'--skeleton' if skeleton else '--replay'} calls no tools",
            hint=f"leave out {' and '.join(tool_flags)}",
        )
    if replay is not None:
        _replay(ctx, replay, ref, text, json, skeleton)
        return
    run_flags = parse_run_flags(ctx)
    _check_tools(tools, run_flags)
    ref, text = choose_model_and_argument(ref, text, run_flags.model)
    if ref is None:
        raise UsageError(
            "no model given", hint=f"llmcli run {DEFAULT_MODEL} 'Why is the sky blue?'"
        )
    config, ui = start_command(json, run_flags.offline)
    prompt = _read_prompt(run_flags, text)
    if prompt is None and (json or skeleton or run_flags.samples > 1):
        raise UserError(
            "no prompt given", hint="give one as PROMPT, with -p or -f, or through a pipe"
        )
    if prompt is not None and run_flags.logprobs and not json:
        raise UsageError("--logprobs needs --json", hint="add --json; in a chat, /probs shows them")
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty", hint=f"llmcli run {ref} 'Why is the sky blue?'")
    if prompt is not None and skeleton:
        from llmcli.batch.skeleton_run import answer_by_skeleton

        result = answer_by_skeleton(ref, prompt, run_flags, config, ui)
        if result is None:
            raise typer.Exit(130)
        _print_skeleton_result(result, ui)
        return
    with _open_chat(
        ref, run_flags, config, ui, logprobs=json, is_chat=prompt is None, tools=tools
    ) as chat_session:
        if prompt is not None and run_flags.file != "-" and text_input.has_unread_input():
            ui.note("note: stdin was not read, because there is a prompt; -f - adds it")
        is_complete = (
            _converse(chat_session, None, run_flags)
            if prompt is None
            else _answer(chat_session, prompt, json, run_flags)
        )
    if not is_complete:
        raise typer.Exit(1)


def _check_tools(tools: ToolRequest, run_flags: RunFlags) -> None:
    """Raise UsageError for options that exclude tools, and UserError for values out of range."""
    tools.limits()
    if tools.mcp is None:
        if flags := list_tool_flags(tools):
            raise UsageError(f"{flags[0]} applies to --mcp", hint="add --mcp FILE")
        return
    for flag, is_active in (
        ("--samples", run_flags.samples > 1),
        ("--raw", run_flags.raw),
        ("a grammar or schema", run_flags.constraint is not None),
    ):
        if is_active:
            raise UsageError(f"--mcp cannot be combined with {flag}", hint="leave out one of them")


def _replay(
    ctx: typer.Context,
    file: str,
    ref: str | None,
    text: str | None,
    json: bool,
    skeleton: bool,
) -> None:
    """Repeat the run that is recorded in `file`, a document of `run --json`, and say whether the
    tokens are the same. Exits with 1 if they are not. Typed options override the recorded ones.
    """
    from llmcli.chat import receipt
    from llmcli.planning.resolve_options import validate_options

    recorded = receipt.read_receipt(text_input.expand_path(file))
    if recorded.tools:
        raise UserError(
            f"{file}: this run had tools, and a replay cannot repeat what they do",
            hint="ask again: llmcli run REF PROMPT --mcp FILE",
        )
    try:
        run_flags = parse_run_flags(ctx, recorded.flags)
        validate_options(run_flags.options)
    except UserError as error:
        # raise the error of typed options that are wrong by themselves
        validate_options(parse_run_flags(ctx).options)
        raise UserError(
            f"{file}: {error}", hint="write it again: llmcli run REF PROMPT --json > FILE"
        ) from None
    ref, text = choose_model_and_argument(ref, text, run_flags.model)
    if text is not None or run_flags.prompt is not None or run_flags.file is not None or skeleton:
        raise UsageError(
            "--replay repeats the prompt of its file", hint="leave out the prompt and --skeleton"
        )
    config, ui = start_command(json, run_flags.offline, trust=run_flags.trust)
    ref = ref or _recorded_model(recorded, config)
    with _open_chat(ref, run_flags, config, ui, logprobs=True, is_chat=False) as chat_session:
        is_same = _answer(chat_session, recorded.request.prompt, json, run_flags, recorded)
    if not is_same:
        raise typer.Exit(1)


def _recorded_model(recorded: "RunReceipt", config: "Config") -> str:
    """Return the REF of a recorded model: its name, or the path of its file if this machine does
    not know the name.
    """
    from llmcli.catalog import fetch

    try:
        fetch.resolve_ref(recorded.model.name, config)
    except UserError:
        return recorded.model.path
    return recorded.model.name


def _print_skeleton_result(result: "SkeletonResult", ui: "UI") -> None:
    if ui.json:
        ui.result(
            {
                "text": result.text,
                "finish": result.document["choices"][0]["finish_reason"],
                "skeleton": result.points,
                "seed": result.seed,
                "usage": result.document["usage"],
                "elapsed_ms": result.seconds * 1000,
            }
        )
        return
    ui.text(result.text)
    summary = (
        "no outline was generated: plain answer"
        if result.points is None
        else f"{len(result.points)} points at once"
    )
    ui.note(
        f"[{summary} · {result.tokens} tok in {result.seconds:.1f} s · "
        f"{result.tokens / result.seconds:.1f} tok/s]"
    )


def _answer(
    chat_session: "ChatSession",
    text: str,
    json: bool,
    run_flags: RunFlags,
    recorded: "RunReceipt | None" = None,
) -> bool:
    """Answer the prompt `text`, and print the answer, or with `json` its document. With `recorded`,
    compare it with the recorded run. Return whether the answer is complete, or the same.
    """
    from llmcli.chat import constraint_report
    from llmcli.chat.display import answer_report
    from llmcli.chat.display.stream_writer import print_dimmed

    stream = chat_session.open_writer(silent=json)
    # --fit may have reduced n_seq_max
    samples = min(run_flags.samples, chat_session.runner.context.n_seq_max)
    answers = (
        chat_session.ask_samples(text, samples, stream)
        if samples > 1
        else [chat_session.ask(text, stream)]
    )
    document = _build_document(chat_session, text, run_flags, answers) if json or recorded else {}
    comparison = _compare(recorded, document) if recorded else None
    if json:
        replay = {"replay": comparison.as_dict()} if comparison else {}
        chat_session.ui.result({**document, **replay})
    else:
        several = samples > 1
        timing_line = (
            answer_report.format_samples_timing(chat_session.runner, answers)
            if several
            else answer_report.format_timing(chat_session.runner, answers[0], shows_load=True)
        )
        for line_text in (timing_line, *answer_report.format_beams(answers[0])):
            print_dimmed(chat_session.ui, line_text)
    for line_text in comparison.describe() if comparison else ():
        chat_session.ui.note(line_text)
    if any(answer.finish == "cancelled" for answer in answers):
        raise typer.Exit(130)
    incomplete_answers = [answer for answer in answers if not chat_session.is_complete(answer)]
    if incomplete_answers:
        chat_session.ui.error(
            *constraint_report.describe_incomplete(
                chat_session.conversation.constraint, incomplete_answers[0]
            )
        )
    if comparison:
        return comparison.token is None
    return not incomplete_answers


def _build_document(
    chat_session: "ChatSession", prompt: str, run_flags: RunFlags, answers: "list[Answer]"
) -> dict[str, Any]:
    """Return the document of `run --json`: the answers, and the receipt of the run."""
    from llmcli.chat import receipt
    from llmcli.chat.display import answer_report

    sample_documents = [
        {**line_text, **chat_session.constraint_json(answer)}
        for line_text, answer in zip(
            answer_report.build_sample_documents(chat_session.runner, answers),
            answers,
            strict=True,
        )
    ]
    document = chat_session.build_document(answers[0], chat_session.last_text)
    document["model"]["sha256"] = chat_session.model_sha256 or _hash_model(chat_session)
    return {
        **document,
        **({"samples": sample_documents} if len(answers) > 1 else {}),
        **receipt.build_receipt(chat_session, run_flags, prompt, answers[0]),
    }


def _hash_model(chat_session: "ChatSession") -> str | None:
    """Return the sha256 of the model's files. Return None, with a warning, if they can no longer be
    read: the answer must still be printed.
    """
    from llmcli.catalog.file_hashes import hash_files

    try:
        return hash_files(chat_session.runner.header.files, chat_session.config, chat_session.ui)
    except OSError as error:
        chat_session.ui.warn(
            f"the model's sha256 is missing: its file cannot be read: {error.strerror}"
        )
        return None


def _compare(recorded: "RunReceipt", document: dict[str, Any]) -> "ReplayComparison":
    from llmcli.chat import receipt

    return receipt.compare_runs(recorded, receipt.parse_receipt(document))


def _find_session(name: str, config: "Config") -> "HistoryItem":
    from llmcli.chat.conversation import history

    return history.find_item(config, name)


def _converse(
    chat_session: "ChatSession",
    first_message: str | None,
    run_flags: RunFlags,
    item: "HistoryItem | None" = None,
) -> bool:
    """Converse until the input ends. If `item` is given, continue this stored conversation.

    Returns False if the answer to a line from a pipe failed.
    """
    from llmcli.chat import resume
    from llmcli.chat.conversation.session_log import SessionLog, end_open_lines

    def apply_flags(conversation: "Conversation") -> None:
        conversation.sampling = conversation.sampling.with_values(run_flags.settings)
        if run_flags.system is not None:
            conversation.system = run_flags.system or None
        if run_flags.predict is not None:
            conversation.predict = None if run_flags.predict == -1 else run_flags.predict
        if run_flags.on_full != "stop":
            conversation.on_full = run_flags.on_full
        if run_flags.constraint:
            conversation.constraint = run_flags.constraint

    end_open_lines(chat_session.config)
    chat_session.log = SessionLog(chat_session.config, chat_session.ui.warn)
    try:
        if item:
            resume.resume_conversation(chat_session, item, apply_flags)
        return _run_loop(chat_session, first_message)
    finally:
        chat_session.log.close()


def _run_loop(chat_session: "ChatSession", first_message: str | None) -> bool:
    from llmcli.chat import ask, input_loop

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        start = chat_session.model.describe(chat_session.name, shows_start=True)
        chat_session.ui.note(f"{start} · /help, Ctrl-D exits")
    if first_message is not None:
        ask.ask_and_print(chat_session, first_message)
    if not interactive:
        return input_loop.run_pipe(chat_session, sys.stdin.buffer)
    from llmcli.chat.terminal import repl

    repl.run_repl(chat_session)
    return True


@contextmanager
def _open_chat(
    ref: str,
    run_flags: RunFlags,
    config: "Config",
    ui: "UI",
    *,
    logprobs: bool = False,
    is_chat: bool,
    tools: ToolRequest = NO_TOOLS,
) -> Iterator["ChatSession"]:
    """Open the model and a chat session for the block. Raises UserError.

    Typed options override the alias's settings, which override the defaults. With `is_chat`, also
    reserve sequences for conversation branches. With `logprobs`, record the log probability of each
    token.
    """
    with ui.status(f"loading {ref} …"):  # the imports take time, too
        from llmcli.chat.chat_session import ChatSession
        from llmcli.chat.conversation.conversation import Conversation
        from llmcli.chat.display.display_settings import HIDE, SHOW, DisplaySettings
        from llmcli.chat.local_model import LocalModel
        from llmcli.chat.settings import find_setting
        from llmcli.chat.terminal.hangup import exit_on_hangup
        from llmcli.chat.terminal.permission import find_asker
        from llmcli.chat.tools.open_tools import open_tools
        from llmcli.commands.chat.bench_adapter import measure
        from llmcli.model_loader.open_model import ModelSwitcher
        from llmcli.runtime.sampling import default_sampling

    with (
        # SIGHUP and SIGTERM do not reach tool servers, which are ended here
        nullcontext() if tools.mcp is None else exit_on_hangup(),
        open_tools(tools, config, ui, find_asker()) as chat_tools,
        closing(ModelSwitcher(run_flags, config, ui, is_chat)) as models,
    ):
        opened_model = models.open(ref)
        sampling = (
            default_sampling().with_values(opened_model.settings).with_values(run_flags.settings)
        )
        system = opened_model.system if run_flags.system is None else run_flags.system
        predict = None if run_flags.predict in (None, -1) else run_flags.predict
        if run_flags.search.beams > 1 and run_flags.settings:
            setting_flags = ", ".join("--" + name.replace("_", "-") for name in run_flags.settings)
            ui.warn(
                f"with {run_flags.search.beams} beams the sampling settings do not apply: "
                f"{setting_flags}"
            )
        # a constrained answer is a document: stdout contains nothing else
        hides_thinking = run_flags.hide_thinking or (
            run_flags.constraint is not None and not is_chat
        )
        search = replace(
            run_flags.search,
            beams=min(run_flags.search.beams, opened_model.runner.context.n_seq_max),
        )
        conversation = Conversation(sampling, system or None, predict, search, run_flags.constraint)
        chat_session = ChatSession(
            opened_model.name,
            LocalModel(opened_model.runner),
            conversation,
            config,
            ui,
            run_flags.stops,
            run_flags.ignore_eos,
            run_flags.endless,
            logprobs,
            reasoning_budget=None
            if run_flags.reasoning_budget == -1
            else run_flags.reasoning_budget,
            file_bytes=opened_model.file_bytes,
            model_sha256=opened_model.sha256,
            models=models,
            measure_speed=measure,
            display=DisplaySettings(
                probs=run_flags.logprobs,
                thinking=HIDE if hides_thinking else SHOW,
                markdown=run_flags.markdown,
            ),
            tools=chat_tools,
        )
        if run_flags.constraint:
            # an unsupported constraint is reported before anything is generated
            grammar = opened_model.runner.grammars(run_flags.constraint)
            if grammar.not_enforced:
                from llmcli.chat import constraint_report

                ui.note(constraint_report.describe_not_enforced(grammar.not_enforced))
        if run_flags.reasoning != "auto":
            find_setting("reasoning").set_value(chat_session, run_flags.reasoning)
        find_setting("on_full").set_value(chat_session, run_flags.on_full)
        yield chat_session


def _read_prompt(run_flags: RunFlags, text: str | None) -> str | None:
    """Return the prompt of `run`; None if none was given and stdin is a terminal.

    The text of `-f` follows the argument PROMPT after a blank line. Stdin is read only without a
    prompt, or for `-f -`: otherwise `run` would wait for a stdin that stays open, and would consume
    the lines of a shell's `while read` loop.
    """
    text_input.require_utf8("PROMPT", text or "")
    if run_flags.prompt is not None and text is not None:
        raise UsageError("the prompt is given twice", hint="use either PROMPT or -p")
    prompt = _read_flags_prompt(run_flags)
    if prompt is None and text is None and sys.stdin is not None and not sys.stdin.isatty():
        return _read_stdin(run_flags)
    if prompt is None or not text:
        return text if prompt is None else prompt
    return f"{text}\n\n{prompt}"


def _read_flags_prompt(run_flags: RunFlags) -> str | None:
    """Return the prompt of -p, or the text of the file of -f, where `-` is stdin; None without
    these flags.
    """
    if run_flags.file is None:
        return run_flags.prompt
    if run_flags.file == "-":
        return _read_stdin(run_flags)
    path = text_input.expand_path(run_flags.file)
    return text_input.read_text(path, keep_line_ends=run_flags.raw).removesuffix("\n")


def _read_stdin(run_flags: RunFlags) -> str:
    if sys.stdin is None:
        return ""
    return text_input.read_standard_input(keep_line_ends=run_flags.raw).removesuffix("\n")
