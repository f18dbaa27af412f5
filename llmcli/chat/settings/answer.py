"""Settings of where an answer ends."""

import json
from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings.base import (
    ANSWER_GROUP,
    SWITCH_WORDS,
    ChatSetting,
    Completion,
    parse_choice,
)
from llmcli.errors import UserError


def parse_predict(value: str) -> int | None:
    """Parse a token limit; -1 means no limit (None). Raises UserError."""
    try:
        number = int(value)
    except ValueError:
        number = -2
    if number < -1:
        raise UserError(
            f"{value!r} is not a token limit",
            hint="predict takes a whole number of tokens, or -1 for no limit",
        )
    return None if number == -1 else number


def _show(chat: ChatSession) -> str:
    return str(-1 if chat.conversation.predict is None else chat.conversation.predict)


def _change(chat: ChatSession, value: str) -> None:
    chat.conversation.predict = parse_predict(value)


def _values(chat: ChatSession) -> Iterable[str]:
    return [Completion("-1", "no limit"), Completion("256", "tokens"), Completion("1024", "tokens")]


def _add_stop_text(chat: ChatSession, value: str) -> None:
    if value.lower() == "none":
        chat.stop_texts = ()
        return
    try:
        text = json.loads(value) if value[:1] == '"' else value
    except ValueError:  # a text that begins with a quote
        text = value
    if not text:
        raise UserError(
            "an empty text would end every answer",
            hint='/set stop "END" ends answers before END, /set stop none removes all stop texts',
        )
    if text not in chat.stop_texts:
        chat.stop_texts = (*chat.stop_texts, text)


def _quoted(texts: tuple[str, ...]) -> str:
    return " ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _switch(name: str, meaning: str) -> ChatSetting:
    """Build the setting of an on/off attribute of the chat session."""

    def change(chat: ChatSession, value: str) -> None:
        setattr(chat, name, SWITCH_WORDS[parse_choice(name, SWITCH_WORDS, value)])

    def show(chat: ChatSession) -> str:
        return next(word for word, on in SWITCH_WORDS.items() if on is getattr(chat, name))

    return ChatSetting(
        name,
        ANSWER_GROUP,
        meaning,
        ", ".join(SWITCH_WORDS),
        "off",
        show,
        change,
        lambda chat: SWITCH_WORDS,
    )


SETTINGS = (
    ChatSetting(
        "predict",
        ANSWER_GROUP,
        "the maximum number of tokens in an answer, -1 = no limit",
        "-1 or more",
        "-1",
        _show,
        _change,
        _values,
        ("n_predict", "num_predict", "max_tokens"),
    ),
    ChatSetting(
        "stop",
        ANSWER_GROUP,
        'an answer ends before any of these texts; "\\n" is a line break',
        "any text, none",
        "none",
        lambda chat: _quoted(chat.stop_texts) or "none",
        _add_stop_text,
        lambda chat: ("none",),
    ),
    _switch("ignore_eos", "continue after the model's end token"),
    _switch("endless", "continue when the answer only repeats itself"),
)
