"""/export: the conversation as a document, for people or for programs."""

import json
from collections.abc import Iterable

from llmcli.atomic_files import write_whole
from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.paths import endings, named
from llmcli.errors import UserError
from llmcli.ui import visible


def export(talk: Talk, rest: str) -> None:
    """Write the conversation as Markdown or JSON, to a file or here.

    `/export md` and `/export json` show it, `/export md FILE` writes FILE, whole or not at all. A
    file that is there already is left alone. JSON has every character of the text; in Markdown
    control characters are pictures.
    """
    form, _, place = rest.partition(" ")
    if form not in FORMS:
        what = f"/export does not know {form!r}" if form else "/export needs a form"
        raise UserError(what, hint="/export md or /export json, then perhaps a file")
    text = FORMS[form](talk)
    if not place.strip():
        talk.ui.text(text)
        return
    path = named(place)
    if path.exists() or path.is_symlink():
        raise UserError(
            f"{path} is there already", hint=f"take another name, or remove it first: rm '{path}'"
        )
    if not path.parent.is_dir():
        raise UserError(
            f"there is no folder {path.parent}", hint=f"make it first: mkdir -p '{path.parent}'"
        )
    write_whole(
        path, (text + "\n").encode("utf-8", "replace"), mode=0o600
    )  # what people say is theirs alone
    talk.ui.text(f"{len(talk.session.messages) // 2} turns written to {path}")


def _markdown(talk: Talk) -> str:
    session = talk.session
    parts = [f"# A chat with {talk.name}"]
    if session.system:
        parts.append(f"## System\n\n{session.system}")
    for index, message in enumerate(session.messages):
        cut = "\n\n*(stopped here)*" if index in session.cut else ""
        parts.append(f"## {message.role.capitalize()}\n\n{message.content.strip()}{cut}")
    return visible("\n\n".join(parts))


def _json(talk: Talk) -> str:
    """The document; what a terminal might obey is escaped, so that it may be shown and is still to
    the letter.
    """
    session = talk.session
    head = [{"role": "system", "content": session.system}] if session.system else []
    said = [
        {
            "role": message.role,
            "content": message.content,
            **({"cut": True} if index in session.cut else {}),
        }
        for index, message in enumerate(session.messages)
    ]
    document = {
        "model": talk.name,
        "settings": session.sampling.as_dict(),
        "messages": [*head, *said],
    }
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    return "".join(
        char if char == "\n" or visible(char) == char else f"\\u{ord(char):04x}" for char in text
    )


FORMS = {"md": _markdown, "json": _json}


def _endings(talk: Talk, typed: str) -> Iterable[str]:
    form, space, place = typed.partition(" ")
    if not space:
        return [name for name in FORMS if name.startswith(form)]
    return [f"{form} {path}" for path in endings(place)] if form in FORMS else ()


COMMANDS = (Command("export", export, "md|json [FILE]", endings=_endings, group="files"),)
