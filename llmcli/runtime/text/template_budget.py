"""The limits of time and memory of a chat template, which is untrusted input.

Loops and calls check the time. Every operation that builds texts or lists first charges a budget.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

# limits of one rendering: its time, and its output in addition to the length of the conversation
MAX_SECONDS, MAX_CHARACTERS = 2.0, 1 << 20
# The budget is this many times the maximum output, because templates join texts repeatedly while
# they build the output.
BUDGET_FACTOR = 64
ITEM_COST = 64  # characters that each new item of a list is charged as


class TemplateBudgetExceeded(Exception):
    """Raised when a template takes too long or builds too much text."""


class TemplateBudget(threading.local):
    """The remaining budget of a rendering: its deadline, and how many characters it may still
    build. An item of a list counts as one character. Each thread has its own.
    """

    deadline = 0.0
    characters_left = 0

    def start_rendering(self, characters: int) -> None:
        """Reset the budget for the rendering of a conversation of `characters` characters."""
        self.deadline = time.monotonic() + MAX_SECONDS
        self.characters_left = BUDGET_FACTOR * (MAX_CHARACTERS + characters)

    def check_time(self) -> None:
        """Raise TemplateBudgetExceeded after the deadline."""
        if time.monotonic() > self.deadline:
            raise TemplateBudgetExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def charge(self, amount: int) -> None:
        """Take `amount` characters from the budget, before they are built. Raises
        TemplateBudgetExceeded when the budget or the time is used up.
        """
        self.characters_left -= max(0, amount)
        if self.characters_left < 0:
            raise TemplateBudgetExceeded("a loop, list or text is too large")
        self.check_time()

    def charge_text_of(self, *values: Any) -> None:
        """Charge the characters that `values` have as text, and one for each item of a list or
        dictionary. Nested lists are followed, because a short list may contain the same long text
        many times.
        """
        from jinja2.utils import Namespace

        stack = list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, Namespace):
                value = object.__getattribute__(value, "_Namespace__attrs")
            if isinstance(value, str):
                self.charge(len(value))
            elif isinstance(value, Mapping):
                self.charge(len(value))
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                self.charge(len(value))
                stack += value
