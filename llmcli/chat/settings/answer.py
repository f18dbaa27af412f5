"""The settings that determine where an answer ends: predict, stop, ignore_eos and endless."""

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
    """Return the maximum number of tokens that the text `value` means, or None for "-1" (no limit).
    Raises UserError if it is not a valid number.
    """
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
    """Add a stop text, which may be a JSON string such as "\\n". The word "none" removes all stop
    texts. Raises UserError if the text is empty.
    """
    if value.lower() == "none":
        chat.stop_texts = ()
        return
    try:
        text = json.loads(value) if value[:1] == '"' else value
    except ValueError:  # not a JSON string, but a text that begins with a quote
        text = value
    if not text:
        raise UserError(
            "an empty text would end every answer",
            hint='/set stop "END" ends answers before END, /set stop none removes all stop texts',
        )
    if text not in chat.stop_texts:
        chat.stop_texts = (*chat.stop_texts, text)


def _quote(texts: tuple[str, ...]) -> str:
    return " ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _switch_setting(name: str, meaning: str) -> ChatSetting:
    """Return an on/off setting that changes the attribute `name` of the chat session. `meaning`:
    its help text.
    """

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
        lambda chat: _quote(chat.stop_texts) or "none",
        _add_stop_text,
        lambda chat: ("none",),
    ),
    _switch_setting("ignore_eos", "continue after the model's end token"),
    _switch_setting("endless", "continue when the answer only repeats itself"),
)
