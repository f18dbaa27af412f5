"""How long an answer may become."""

from collections.abc import Iterable

from llmcli.chat.knobs.base import ANSWER, Knob, Offer
from llmcli.chat.talk import Talk
from llmcli.errors import UserError


def predict(value: str) -> int | None:
    """A limit of tokens as people write it; -1 is none. Raises UserError."""
    try:
        number = int(value)
    except ValueError:
        number = -2
    if number < -1:
        raise UserError(f"predict is {value!r}", hint="predict takes a whole number of tokens, -1 = no limit")
    return None if number == -1 else number


def _show(talk: Talk) -> str:
    return str(-1 if talk.session.predict is None else talk.session.predict)


def _change(talk: Talk, value: str) -> None:
    talk.session.predict = predict(value)


def _values(talk: Talk) -> Iterable[str]:
    return [Offer("-1", "no limit"), Offer("256", "tokens"), Offer("1024", "tokens")]


KNOBS = (
    Knob(
        "predict", ANSWER, "the most tokens of an answer, -1 = no limit", "from -1 up", "-1", _show, _change, _values,
        ("n_predict", "num_predict", "max_tokens"),
    ),
)  # fmt: skip
