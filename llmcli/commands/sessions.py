"""`llmcli sessions`: lists, shows and removes conversations on this disk. These are saved chats and
the logs of chat sessions.
"""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_app import CommandApp
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json

if TYPE_CHECKING:
    from llmcli.chat.conversation.history import HistoryItem
    from llmcli.chat.conversation.stored_conversation import StoredConversation
    from llmcli.ui import UI

QUESTION_CHARACTERS, DEFAULT_ROWS = 48, 30  # characters of a question; rows of a list
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from the list, or `last`.")]

group = CommandApp(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.add_typer(
        group,
        name="sessions",
        help="List the conversations on this disk. `chat --resume NAME` resumes one.",
    )


@group.callback()
def sessions(
    ctx: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", help=f"List more than the newest {DEFAULT_ROWS}.")
    ] = False,
    json: Json = False,
) -> None:
    """List the conversations on this disk. `llmcli chat --resume NAME` resumes one."""
    if ctx.invoked_subcommand:
        return
    from llmcli.chat.conversation import history

    config, ui = start_command(json)
    items = history.list_history(config)
    listed = items if everything or json else items[:DEFAULT_ROWS]
    rows = [_list_row(item, ui) for item in listed]
    if json:
        ui.result(rows)
    elif rows:
        _print_table(rows, ui)
        if len(listed) < len(items):
            ui.text(f"and {len(items) - len(listed)} older: llmcli sessions --all")
    else:
        ui.text("no conversations yet; llmcli chat starts one")


@group.command()
def show(name: Name, json: Json = False) -> None:
    """Print a conversation."""
    from llmcli.chat.conversation import history, turn_records
    from llmcli.units import format_count

    config, ui = start_command(json)
    item = history.find_item(config, name)
    conversation = item.read_conversation()
    tree, path = conversation.tree, conversation.tree.current_path()
    if json:
        turns = [
            {"turn": number, **turn_records.build_turn_record(turn)}
            for number, turn in enumerate(tree.turns, 1)
        ]
        ui.result(
            {
                **_fields(item, conversation),
                "system": conversation.system,
                **turn_records.build_position_record(tree),
                "turns": turns,
            }
        )
        return
    ui.text(
        f"{item.name} · {conversation.model or 'no model'} · "
        f"{_format_time(item)[:16].replace('T', ' ')}"
    )
    if conversation.system:
        ui.text(f"\n[system] {conversation.system}")
    for number in path:
        mark = " [cut]" if tree[number].is_stopped else ""
        ui.text(f"\n>>> {tree[number].question}")
        for step in tree[number].steps:
            if step.text:
                ui.text(f"\n{step.text}")
            for call in step.calls:
                ui.text(f"\n[{call.name}({call.arguments})]\n{call.result}")
        ui.text(f"\n{tree[number].answer}{mark}")
    if n_others := len(tree.turns) - len(path):
        ui.note(
            f"{format_count(n_others, 'turn')} on other branches: chat --resume {item.name}, then /tree"
        )
    if conversation.pending_message:
        ui.note(f"not answered: {conversation.pending_message}")


@group.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names in the list.")],
) -> None:
    """Delete conversations and their KV states."""
    from llmcli.chat.conversation import history
    from llmcli.units import format_size

    config, ui = start_command()
    for item in [history.find_item(config, name) for name in names]:
        ui.text(f"removed {item.name}: {format_size(history.remove_item(item))} freed")


def _list_row(item: "HistoryItem", ui: "UI") -> dict[str, Any]:
    """Return the fields of one conversation in the list. For an unreadable conversation, print a
    note and return empty fields.
    """
    from llmcli.chat.conversation.stored_conversation import StoredConversation
    from llmcli.chat.conversation.turn_tree import TurnTree
    from quant.errors import UserError

    try:
        return _fields(item, item.read_conversation())
    except UserError as error:
        ui.note(f"{item.name}: {error}")
        return _fields(item, StoredConversation(TurnTree()))


def _fields(item: "HistoryItem", conversation: "StoredConversation") -> dict[str, Any]:
    return {
        "name": item.name,
        "kind": item.kind,
        "time": _format_time(item),
        "model": conversation.model or None,
        "turns": len(conversation.tree.turns),
        "first": conversation.first_question or None,
        "bytes": item.nbytes + item.state_bytes,
        "kv_bytes": item.state_bytes,
        "path": str(item.path),
    }


def _format_time(item: "HistoryItem") -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(item.modified_time))


def _print_table(rows: list[dict[str, Any]], ui: "UI") -> None:
    from llmcli.chat.display.tree_drawing import shorten
    from llmcli.units import format_size

    ui.table(
        ("name", "kind", "when", "model", "turns", "first question", "size"),
        [
            (
                row["name"],
                row["kind"],
                row["time"][:16].replace("T", " "),
                row["model"] or "-",
                str(row["turns"]),
                shorten(row["first"] or "-", QUESTION_CHARACTERS),
                format_size(row["bytes"]),
            )
            for row in rows
        ],
        right=("turns", "size"),
    )
