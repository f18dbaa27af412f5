"""The pages of --help: panels at every width, nothing cut off, and only options that work."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from llmcli.commands.cli import app
from llmcli.commands.command_line import help_page, panels
from llmcli.commands.options.run import FLAGS_OF_FIELD, PANEL_OF_FLAG, RunCommand, run_flags
from llmcli.errors import UserError
from llmcli.runtime.sampling import sampling_settings
from llmcli.word_wrap import text_columns

WIDTHS = (40, 60, 80, 140)
FRAME = re.compile(r"[╭╮╰╯│─]")


def walk(name: str, command: Any, parent: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the command and the context of a command and of all its subcommands."""
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
    yield name, command, context
    if hasattr(command, "list_commands"):
        for word in command.list_commands(context):
            yield from walk(f"{name} {word}", command.get_command(context, word), context)


COMMANDS = list(walk("llmcli", typer.main.get_command(app)))
RUN_COMMANDS = {name: item for name, *item in COMMANDS if isinstance(item[0], RunCommand)}


def page(name: str, command: Any, context: Any, width: int) -> str:
    return help_page.render_page(
        help_page.usage(command, context, name),
        command.help or "",
        help_page.parameter_panels(command, context),
        width,
    )


def words(text: str) -> list[str]:
    return FRAME.sub(" ", text).split()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_terminal_or_cut_off(width: int) -> None:
    for name, command, context in COMMANDS:
        text = page(name, command, context, width)
        assert max(map(text_columns, text.split("\n"))) <= width, name
        assert "…" not in text, name
        shown = " ".join(words(text))
        for parameter in command.get_params(context):
            if row := help_page.parameter_row(parameter, context):
                assert " ".join(words(row.text)) in shown, (name, row)
                assert all(word in shown for word in row.name.split()), (name, row)


@pytest.mark.parametrize(
    ("name", "command", "context"), COMMANDS, ids=[name for name, *_ in COMMANDS]
)
def test_values_have_names_that_people_use(name: str, command: Any, context: Any) -> None:
    text = page(name, command, context, 80)
    assert not re.search(r"<(int|float|str|list|path|file)\b|x[<>]=|[{}]REF", text)


def test_a_run_option_is_in_the_panel_of_its_subject() -> None:
    for flag in run_flags():
        is_sampling = flag.name in sampling_settings()
        assert is_sampling or flag.name in PANEL_OF_FLAG, flag.name
    command, context = RUN_COMMANDS["llmcli run"]
    titles = [panel.title for panel in help_page.parameter_panels(command, context)]
    subjects = ["Model", "Sampling", "Context and memory", "Speed", "Output"]
    assert [title for title in titles if title in subjects] == subjects
    rows = {
        panel.title: " ".join(row.name for row in panel.rows)
        for panel in help_page.parameter_panels(command, context)
    }
    assert "--temp" in rows["Sampling"]
    assert "--ctx-size" in rows["Context and memory"]
    assert "--threads" in rows["Speed"]
    assert "--json" in rows["Output"]


def test_every_panel_has_a_place() -> None:
    for _, command, context in COMMANDS:
        for panel in help_page.parameter_panels(command, context):
            assert panel.title in (help_page.ARGUMENTS, *panels.PANEL_ORDER)


# A value of each field of RunFlags that a command may refuse.
CHANGED_FIELDS = {
    "prompt": "hi",
    "file": "x",
    "logprobs": 3,
    "markdown": True,
    "hide_thinking": True,
    "ignore_eos": True,
    "endless": True,
    "samples": 2,
    "on_full": "shift",
    "system": "be brief",
    "stops": ("x",),
    "predict": 3,
    "raw": True,
    "model_draft": "x",
    "ngram_draft": "on",
    "reasoning": "off",
    "reasoning_budget": 5,
}


def listed_names(command: Any, context: Any) -> set[str]:
    return {param.name for param in command.get_params(context) if not param.hidden}


@pytest.mark.parametrize("name", ["serve", "batch"])
def test_help_lists_no_option_that_serve_or_batch_refuses(name: str) -> None:
    from dataclasses import replace

    from llmcli.batch.run import without_line_options
    from llmcli.model_loader.open_server_model import refuse_personal_flags
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.constraint.base import Constraint
    from llmcli.runtime.requests.beam_settings import BeamSettings
    from llmcli.runtime.requests.request import RunOptions

    plain = RunFlags(RunOptions(), {}, BeamSettings())
    changes = CHANGED_FIELDS | {
        "constraint": Constraint("json_schema", "{}"),
        "search": BeamSettings(length_penalty=2.0),
    }
    listed = listed_names(*RUN_COMMANDS[f"llmcli {name}"])
    for field, value in changes.items():
        flags = replace(plain, **{field: value})
        options = FLAGS_OF_FIELD.get(field, (field,))
        try:
            refuse_personal_flags(without_line_options(flags) if name == "batch" else flags)
        except UserError:
            assert listed.isdisjoint(options), field
        else:
            assert listed.issuperset(options), field


def test_help_of_chat_lists_no_samples() -> None:
    assert "samples" not in listed_names(*RUN_COMMANDS["llmcli chat"])
    assert "samples" in listed_names(*RUN_COMMANDS["llmcli run"])


def test_a_hidden_option_is_still_parsed(llmcli: Any) -> None:
    done = llmcli("chat", "x", "--samples", "3")
    assert (done.code, "--samples N" in done.err) == (2, True)


def test_help_without_unicode_has_frames_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_page.render_page(
        "llmcli x",
        "Do x.",
        [help_page.HelpPanel("Options", (help_page.HelpRow("-y", "why"),))],
        40,
        has_unicode=False,
    )
    assert text.isascii()
    assert text.split("\n")[4] == "+- Options ----------------------------+"


def test_every_name_of_a_model_is_completed() -> None:
    open_words = [
        (name, parameter.name)
        for name, command, context in COMMANDS
        for parameter in command.get_params(context)
        if parameter.metavar in ("REF", "SRC") and not parameter._custom_shell_complete
    ]
    assert open_words == []
