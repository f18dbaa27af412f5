"""Settings of how answers are displayed. They do not change what the model generates."""

from dataclasses import dataclass

TIMING_MODES = ("off", "line", "tokens")
SHOW, FOLD, HIDE = "show", "fold", "hide"


@dataclass(slots=True)
class DisplaySettings:
    """The display settings of one session.

    - `timing`: off, one line after an answer, or the milliseconds of every token, too.
    - `thinking`: shown dimmed, folded into one line, or hidden.
    - `markdown`: rendered on a terminal.
    - `probs`: the number of likeliest tokens kept at each step for /probs.
    """

    timing: str = "line"
    thinking: str = SHOW
    markdown: bool = False
    probs: int = 0
