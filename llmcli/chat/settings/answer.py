"""Settings of where an answer ends."""

import json
from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import ANSWER, SWITCH, Knob, Offer, one_of
from llmcli.errors import UserError


def predict(value: str) -> int | None:
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


def _show(chat: Talk) -> str:
    return str(-1 if chat.session.predict is None else chat.session.predict)


def _change(chat: Talk, value: str) -> None:
    chat.session.predict = predict(value)


def _values(chat: Talk) -> Iterable[str]:
    return [Offer("-1", "no limit"), Offer("256", "tokens"), Offer("1024", "tokens")]


def _stop(chat: Talk, value: str) -> None:
    if value.lower() == "none":
        chat.stops = ()
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
    if text not in chat.stops:
        chat.stops = (*chat.stops, text)


def _quoted(texts: tuple[str, ...]) -> str:
    return " ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _switch(name: str, meaning: str) -> Knob:
    """Build the setting of an on/off attribute of the chat session."""

    def change(chat: Talk, value: str) -> None:
        setattr(chat, name, SWITCH[one_of(name, SWITCH, value)])

    def show(chat: Talk) -> str:
        return next(word for word, on in SWITCH.items() if on is getattr(chat, name))

    return Knob(name, ANSWER, meaning, ", ".join(SWITCH), "off", show, change, lambda chat: SWITCH)


SETTINGS = (
    Knob(
        "predict",
        ANSWER,
        "the maximum number of tokens in an answer, -1 = no limit",
        "-1 or more",
        "-1",
        _show,
        _change,
        _values,
        ("n_predict", "num_predict", "max_tokens"),
    ),
    Knob(
        "stop",
        ANSWER,
        'an answer ends before any of these texts; "\\n" is a line break',
        "any text, none",
        "none",
        lambda chat: _quoted(chat.stops) or "none",
        _stop,
        lambda chat: ("none",),
    ),
    _switch("ignore_eos", "continue after the model's end token"),
    _switch("endless", "continue when the answer only repeats itself"),
)
