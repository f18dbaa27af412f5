"""Where an answer ends."""

import json
from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.settings.base import ANSWER, SWITCH, Knob, Offer, one_of
from llmcli.errors import UserError


def predict(value: str) -> int | None:
    """A limit of tokens as people write it; -1 is none. Raises UserError."""
    try:
        number = int(value)
    except ValueError:
        number = -2
    if number < -1:
        raise UserError(
            f"predict is {value!r}", hint="predict takes a whole number of tokens, -1 = no limit"
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
            "an empty text ends every answer",
            hint='/set stop "END" ends it there, /set stop none nowhere',
        )
    if text not in talk.stops:
        talk.stops = (*talk.stops, text)


def _quoted(texts: tuple[str, ...]) -> str:
    return " ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _switch(name: str, meaning: str) -> Knob:
    """A knob for one of the talk's own switches."""

    def change(talk: Talk, value: str) -> None:
        setattr(talk, name, SWITCH[one_of(name, SWITCH, value)])

    def show(talk: Talk) -> str:
        return next(word for word, on in SWITCH.items() if on is getattr(talk, name))

    return Knob(name, ANSWER, meaning, ", ".join(SWITCH), "off", show, change, lambda talk: SWITCH)


KNOBS = (
    Knob(
        "predict",
        ANSWER,
        "the most tokens of an answer, -1 = no limit",
        "from -1 up",
        "-1",
        _show,
        _change,
        _values,
        ("n_predict", "num_predict", "max_tokens"),
    ),
    Knob(
        "stop",
        ANSWER,
        'an answer ends before any of these; "\\n" is a line\'s end',
        "any text, none",
        "none",
        lambda talk: _quoted(talk.stops) or "none",
        _stop,
        lambda talk: ("none",),
    ),
    _switch("ignore_eos", "go on where the model would end"),
    _switch("endless", "go on where the answer only repeats itself"),
)
