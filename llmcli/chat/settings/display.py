"""Settings of how answers are displayed."""

from collections.abc import Callable, Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, TIMINGS, Screen
from llmcli.chat.settings.base import SCREEN, SWITCH, Knob, Offer, one_of
from llmcli.errors import UserError
from llmcli.runtime.sampling.top_logprobs import MAX_TOP_LOGPROBS


def _words(name: str, meaning: str, about: dict[str, str]) -> Knob:
    """Build a display setting that takes one of several words; `about` describes each word."""

    def change(chat: Talk, value: str) -> None:
        setattr(chat.screen, name, one_of(name, about, value))

    def values(chat: Talk) -> Iterable[str]:
        return [Offer(word, what) for word, what in about.items()]

    show: Callable[[Talk], str] = lambda chat: str(getattr(chat.screen, name))  # noqa: E731
    return Knob(
        name, SCREEN, meaning, ", ".join(about), str(getattr(Screen(), name)), show, change, values
    )


WHAT = ("nothing", "one line after an answer", "the milliseconds of every token, and the line")


def _draw(chat: Talk, value: str) -> None:
    chat.screen.markdown = SWITCH[one_of("markdown", SWITCH, value)]


def _keep(chat: Talk, value: str) -> None:
    if not (
        value.isascii() and value.isdigit() and len(value) < 9 and int(value) <= MAX_TOP_LOGPROBS
    ):
        raise UserError(
            f"{value!r} is not a value of probs",
            hint=f"probs takes a whole number from 0 to {MAX_TOP_LOGPROBS}: "
            "the number of alternatives kept for each token, 0 = off",
        )
    chat.screen.probs = int(value)


SETTINGS = (
    _words("timing", "what is shown of an answer's time", dict(zip(TIMINGS, WHAT, strict=True))),
    _words(
        "thinking",
        "how a model's thinking is shown",
        {SHOW: "dimmed; unchanged in a pipe", FOLD: "folded into one line", HIDE: "hidden"},
    ),
    Knob(
        "markdown",
        SCREEN,
        "render an answer's Markdown on a terminal",
        ", ".join(SWITCH),
        "off",
        lambda chat: next(word for word, on in SWITCH.items() if on is chat.screen.markdown),
        _draw,
        lambda chat: SWITCH,
    ),
    Knob(
        "probs",
        SCREEN,
        "alternatives kept for each token, for /probs; 0 = off",
        f"from 0 to {MAX_TOP_LOGPROBS}",
        "0",
        lambda chat: str(chat.screen.probs),
        _keep,
        lambda chat: (Offer("0", "off"), Offer("10", "as /probs on")),
    ),
)
