"""The settings that change how answers are displayed: timing, thinking, markdown and probs."""

from collections.abc import Callable, Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, TIMING_MODES, DisplaySettings
from llmcli.chat.settings.base import (
    DISPLAY_GROUP,
    SWITCH_WORDS,
    ChatSetting,
    Completion,
    parse_choice,
)
from llmcli.errors import UserError
from llmcli.runtime.sampling.top_logprobs import MAX_TOP_LOGPROBS


def _word_setting(name: str, meaning: str, about: dict[str, str]) -> ChatSetting:
    """Return the setting for the attribute `name` of DisplaySettings. `meaning`: its help text.
    `about`: the words that it accepts, each with a description.
    """

    def change(chat: ChatSession, value: str) -> None:
        setattr(chat.display, name, parse_choice(name, about, value))

    def values(chat: ChatSession) -> Iterable[str]:
        return [Completion(word, description) for word, description in about.items()]

    show: Callable[[ChatSession], str] = lambda chat: str(getattr(chat.display, name))  # noqa: E731
    return ChatSetting(
        name,
        DISPLAY_GROUP,
        meaning,
        ", ".join(about),
        str(getattr(DisplaySettings(), name)),
        show,
        change,
        values,
    )


TIMING_DESCRIPTIONS = (
    "nothing",
    "one line after an answer",
    "the milliseconds of every token, and the line",
)


def _set_markdown(chat: ChatSession, value: str) -> None:
    chat.display.markdown = SWITCH_WORDS[parse_choice("markdown", SWITCH_WORDS, value)]


def _set_probs(chat: ChatSession, value: str) -> None:
    if not (
        value.isascii() and value.isdigit() and len(value) < 9 and int(value) <= MAX_TOP_LOGPROBS
    ):
        raise UserError(
            f"{value!r} is not a value of probs",
            hint=f"probs takes a whole number from 0 to {MAX_TOP_LOGPROBS}: "
            "the number of alternatives kept for each token, 0 = off",
        )
    chat.display.probs = int(value)


SETTINGS = (
    _word_setting(
        "timing",
        "what is shown of an answer's time",
        dict(zip(TIMING_MODES, TIMING_DESCRIPTIONS, strict=True)),
    ),
    _word_setting(
        "thinking",
        "how a model's thinking is shown",
        {SHOW: "dimmed; unchanged in a pipe", FOLD: "folded into one line", HIDE: "hidden"},
    ),
    ChatSetting(
        "markdown",
        DISPLAY_GROUP,
        "render an answer's Markdown on a terminal",
        ", ".join(SWITCH_WORDS),
        "off",
        lambda chat: next(word for word, on in SWITCH_WORDS.items() if on is chat.display.markdown),
        _set_markdown,
        lambda chat: SWITCH_WORDS,
    ),
    ChatSetting(
        "probs",
        DISPLAY_GROUP,
        "alternatives kept for each token, for /probs; 0 = off",
        f"from 0 to {MAX_TOP_LOGPROBS}",
        "0",
        lambda chat: str(chat.display.probs),
        _set_probs,
        lambda chat: (Completion("0", "off"), Completion("10", "as /probs on")),
    ),
)
