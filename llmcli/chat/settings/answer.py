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


def _show(talk: Talk) -> str:
    return str(-1 if talk.session.predict is None else talk.session.predict)


def _change(talk: Talk, value: str) -> None:
    talk.session.predict = predict(value)


def _values(talk: Talk) -> Iterable[str]:
    return [Offer("-1", "no limit"), Offer("256", "tokens"), Offer("1024", "tokens")]


def _stop(talk: Talk, value: str) -> None:
    if value.lower() == "none":
        talk.stops = ()
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
    if text not in talk.stops:
        talk.stops = (*talk.stops, text)


def _quoted(texts: tuple[str, ...]) -> str:
    return " ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _switch(name: str, meaning: str) -> Knob:
    """Build the setting of an on/off attribute of the chat session."""

    def change(talk: Talk, value: str) -> None:
        setattr(talk, name, SWITCH[one_of(name, SWITCH, value)])

    def show(talk: Talk) -> str:
        return next(word for word, on in SWITCH.items() if on is getattr(talk, name))

    return Knob(name, ANSWER, meaning, ", ".join(SWITCH), "off", show, change, lambda talk: SWITCH)


KNOBS = (
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
        lambda talk: _quoted(talk.stops) or "none",
        _stop,
        lambda talk: ("none",),
    ),
    _switch("ignore_eos", "continue after the model's end token"),
    _switch("endless", "continue when the answer only repeats itself"),
)
