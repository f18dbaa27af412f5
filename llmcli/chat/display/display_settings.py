"""What of an answer is shown, and how: nothing here changes what the model is asked or says."""

from dataclasses import dataclass

TIMINGS = ("off", "line", "tokens")
SHOW, FOLD, HIDE = "show", "fold", "hide"


@dataclass(slots=True)
class Screen:
    """The choices of one sitting. `timing`: nothing, one line after an answer, or every token's
    milliseconds too. `thinking`: dimmed, one line in its place, or left out. `markdown`: drawn, on
    a terminal. `probs`: how many of the likeliest tokens are kept at each step, for /probs.
    """

    timing: str = "line"
    thinking: str = SHOW
    markdown: bool = False
    probs: int = 0
