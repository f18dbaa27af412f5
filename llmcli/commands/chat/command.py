"""`llmcli chat` and `llmcli run`: open the model, start a conversation or answer one prompt,
print.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli import text_input
from llmcli.commands.command_context import start
from llmcli.commands.options import run as flags
from llmcli.commands.options.arguments import DEFAULT, REF
from llmcli.commands.options.run import RunCommand
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.run_flags import Flags
from llmcli.text_input import decoded

if TYPE_CHECKING:
    from llmcli.chat.chat_session import Talk
    from llmcli.chat.conversation.conversation import Session
    from llmcli.chat.conversation.history import Item
    from llmcli.config import Config
    from llmcli.ui import UI


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("chat", cls=RunCommand)(chat)
    app.command("run", cls=RunCommand)(run)


def chat(
    ctx: typer.Context,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help=f"{REF} Default: {DEFAULT}")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME]",
            help="Resume a saved chat or an earlier session; without a name the last one.",
        ),
    ] = None,
) -> None:
    """Chat with a model. Input from a pipe is read as one message per line."""
    given = flags.read(ctx)
    if ref and given.model:
        raise UsageError(f"two models given: {ref} and {given.model}", hint="leave out one")
    if given.samples > 1:
        raise UsageError(
            "chat gives one answer at a time",
            hint="for several: llmcli run REF PROMPT --samples N",
        )
    config, ui = start(offline=given.offline)
    item, ref = _find_session(resume, config) if resume else None, ref or given.model
    if item and not ref and (ref := item.read().model):
        ui.note(
            f"{item.name}: resumed with {ref} (with another model: "
            f"llmcli chat REF --resume {item.name})"
        )
    with _open_chat(ref or DEFAULT, given, config, ui, talks=True) as talk:
        is_complete = _converse(talk, _read_flags_prompt(given), given, item)
    if not is_complete:
        raise typer.Exit(1)


def run(
    ctx: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help=REF)] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; may also come from stdin.")
    ] = None,
    skeleton: Annotated[
        bool,
        typer.Option(
            "--skeleton", help="Skeleton-of-Thought: an outline, then its points in parallel."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, with the time of every token.")
    ] = False,
) -> None:
    """Answer one prompt and exit.

    Without a prompt, on a terminal, opens the chat.
    """
    given = flags.read(ctx)
    if given.model:
        if text is not None:
            raise UsageError(f"two models given: {ref} and {given.model}", hint="leave out one")
        ref, text = given.model, ref
    if ref is None:
        raise UsageError("no model given", hint=f"llmcli run {DEFAULT} 'Why is the sky blue?'")
    config, ui = start(json, given.offline)
    prompt = _prompt(given, text)
    if prompt is None and (json or skeleton or given.samples > 1):
        raise UserError(
            "no prompt given", hint="give one as PROMPT, with -p or -f, or through a pipe"
        )
    if prompt is not None and given.logprobs and not json:
        raise UsageError("--logprobs needs --json", hint="add --json; in a chat, /probs shows them")
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty", hint=f"llmcli run {ref} 'Why is the sky blue?'")
    if prompt is not None and skeleton:
        from llmcli.batch import skeleton_run

        skeleton_run.answer(ref, prompt, given, config, ui)
        return
    with _open_chat(ref, given, config, ui, logprobs=json, talks=prompt is None) as talk:
        is_complete = (
            _converse(talk, None, given)
            if prompt is None
            else _answer(talk, prompt, json, given.samples)
        )
    if not is_complete:
        raise typer.Exit(1)


def _answer(talk: "Talk", text: str, json: bool, samples: int) -> bool:
    from llmcli.chat import constraint_report
    from llmcli.chat.display import answer_report
    from llmcli.chat.display.stream_writer import aside

    stream = talk.stream(silent=json)
    samples = min(samples, talk.runner.context.n_seq_max)  # --fit may have reduced it
    answers = talk.samples(text, samples, stream) if samples > 1 else [talk.ask(text, stream)]
    if json:
        sample_documents = [
            {**line_text, **constraint_report.facts(talk, answer)}
            for line_text, answer in zip(
                answer_report.samples(talk.runner, answers), answers, strict=True
            )
        ]
        talk.ui.result(
            {**talk.document(answers[0]), **({"samples": sample_documents} if samples > 1 else {})}
        )
    else:
        several = samples > 1
        timing_line = (
            answer_report.samples_line(talk.runner, answers)
            if several
            else answer_report.timing_line(talk.runner, answers[0])
        )
        for line_text in (timing_line, *answer_report.beam_lines(answers[0])):
            aside(talk.ui, line_text)
    if any(answer.finish == "cancelled" for answer in answers):
        raise typer.Exit(130)
    incomplete_answers = [answer for answer in answers if not constraint_report.whole(talk, answer)]
    if incomplete_answers:
        talk.ui.error(*constraint_report.incomplete(talk, incomplete_answers[0]))
    return not incomplete_answers


def _find_session(name: str, config: "Config") -> "Item":
    from llmcli.chat.conversation import history

    return history.find(config, name)


def _converse(talk: "Talk", first: str | None, given: Flags, item: "Item | None" = None) -> bool:
    """Converse until the input ends, starting from `item` if given; return False if a line from a
    pipe failed.
    """
    from llmcli.chat import resume
    from llmcli.chat.conversation.session_log import Log

    def typed(session: "Session") -> None:
        session.sampling = session.sampling.with_values(given.settings)
        if given.system is not None:
            session.system = given.system or None
        if given.predict is not None:
            session.predict = None if given.predict == -1 else given.predict
        if given.on_full != "stop":
            session.on_full = given.on_full
        if given.constraint:
            session.constraint = given.constraint

    talk.log = Log(talk.config, talk.ui.warn)
    try:
        if item:
            resume.go_on(talk, item, typed)
        return _talk(talk, first)
    finally:
        talk.log.close()


def _talk(talk: "Talk", first: str | None) -> bool:
    from llmcli.chat import ask, input_loop

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        context = f"{talk.runner.n_ctx} tokens of context"
        talk.ui.note(
            f"{talk.name} · {talk.runner.header.file_type} · {context} · /help, Ctrl-D exits"
        )
    if first is not None:
        ask.answer(talk, first)
    if not interactive:
        return input_loop.pipe(talk, sys.stdin.buffer)
    from llmcli.chat.terminal import repl

    repl.converse(talk)
    return True


@contextmanager
def _open_chat(
    ref: str, given: Flags, config: "Config", ui: "UI", *, logprobs: bool = False, talks: bool
) -> Iterator["Talk"]:
    """Open the model and the chat session.

    Typed options override the alias's settings, which override the defaults. With `is_chat`,
    sequences for branches are reserved. Raises UserError.
    """
    from llmcli.chat.chat_session import Talk
    from llmcli.chat.conversation.conversation import Session
    from llmcli.chat.display.display_settings import HIDE, SHOW, Screen
    from llmcli.chat.settings import find
    from llmcli.commands.chat.bench_adapter import measure
    from llmcli.model_loader.open_model import Models
    from llmcli.runtime.sampling import defaults

    with closing(Models(given, config, ui, talks)) as models:
        opened_model = models.first(ref)
        sampling = defaults().with_values(opened_model.settings).with_values(given.settings)
        system = opened_model.system if given.system is None else given.system
        predict = None if given.predict in (None, -1) else given.predict
        if given.search.beams > 1 and given.settings:
            setting_flags = ", ".join("--" + name.replace("_", "-") for name in given.settings)
            ui.warn(
                f"with {given.search.beams} beams the sampling settings do not apply: "
                f"{setting_flags}"
            )
        # a constrained answer is a document: stdout contains nothing else
        hides_thinking = given.hide_thinking or (given.constraint is not None and not talks)
        search = replace(
            given.search, beams=min(given.search.beams, opened_model.runner.context.n_seq_max)
        )
        session = Session(sampling, system or None, predict, search, given.constraint)
        talk = Talk(
            opened_model.name,
            opened_model.runner,
            session,
            config,
            ui,
            given.stops,
            given.ignore_eos,
            given.endless,
            logprobs,
            file_bytes=opened_model.file_bytes,
            models=models,
            measure=measure,
            screen=Screen(
                probs=given.logprobs,
                thinking=HIDE if hides_thinking else SHOW,
                markdown=given.markdown,
            ),
        )
        if given.constraint:
            # an unsupported constraint is reported before anything is generated
            opened_model.runner.grammars(given.constraint)
        if given.reasoning != "auto":
            find("reasoning").change(talk, given.reasoning)
        find("on_full").change(talk, given.on_full)
        yield talk


def _prompt(given: Flags, text: str | None) -> str | None:
    """Return the prompt of `run`; None if none was given and stdin is a terminal.

    Text from a pipe is appended to PROMPT after a blank line, as in `llm`; with -p or -f, stdin is
    not read.
    """
    prompt = _read_flags_prompt(given)
    text_input.proper("PROMPT", text or "")
    if prompt is not None and text is not None:
        raise UsageError("the prompt is given twice", hint="use either PROMPT, or -p or -f")
    if prompt is not None:
        return prompt
    if sys.stdin is None or sys.stdin.isatty():
        return text
    piped = decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")
    return "\n\n".join(part for part in (text, piped) if part)


def _read_flags_prompt(given: Flags) -> str | None:
    """Return the prompt given by -p or -f."""
    if given.file is not None:
        return text_input.text_file(Path(given.file).expanduser()).removesuffix("\n")
    return given.prompt
