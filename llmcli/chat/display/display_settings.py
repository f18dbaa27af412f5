"""Settings that change how answers are displayed, but not what the model generates."""

from dataclasses import dataclass

TIMING_MODES = ("off", "line", "tokens")
SHOW, FOLD, HIDE = "show", "fold", "hide"


@dataclass(slots=True)
class DisplaySettings:
    """The display settings of a chat session.

    - `timing`: one of TIMING_MODES: print nothing about the time, one line after an answer, or also
      the milliseconds of every token.
    - `thinking`: SHOW displays thinking dimmed, FOLD replaces it by one line, HIDE omits it.
    - `markdown`: whether to render Markdown on a terminal.
    - `probs`: number of likeliest tokens that are stored for each token, for /probs.
    """

    timing: str = "line"
    thinking: str = SHOW
    markdown: bool = False
    probs: int = 0
