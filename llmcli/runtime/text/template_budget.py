"""The limits of time and memory of a chat template, which is untrusted input.

Loops and calls check the time. Every operation that builds texts or lists, or that reads long ones,
first charges a budget, so that a single operation can be neither long nor large. A list that
contains another one twice, which contains a third one twice, and so on, is small, but takes
exponential time to print or to compare. Such operations are charged for every path.
"""

import threading
import time
from collections.abc import Collection, Iterator, KeysView, Mapping, MappingView, Set
from typing import Any, TypeGuard

# Of processor time for all renderings for one prompt. On a busy machine they may take longer.
MAX_SECONDS = 2.0
# What the time between two readings counts at most. Python's garbage collector, or a host that stops
# a virtual machine, may take longer. An operation of a template seldom does, because of its budget.
MAX_STEP_SECONDS = 0.25
MAX_CHARACTERS = 1 << 20  # of the output, in addition to the length of the conversation
# The budget is this many times the maximum output, because templates join texts repeatedly while
# they build the output.
BUDGET_FACTOR = 64
# Characters that other objects are charged as: a new short text or list, and an entry of a list that
# refers to an object.
ITEM_COST, ENTRY_COST = 64, 2
# Characters that are compared or searched for the cost of one that is built.
SCAN_RATE = 8
# Largest absolute value of an integer. The time of arithmetic grows with the number of digits.
MAX_INTEGER = 1 << 256
MAX_CHAINED_ITERATORS = 64
CHARGED_AT_ONCE = 1000  # characters of small texts, because each charge reads the clock
SCALARS = (bool, int, float, type(None))


class TemplateBudgetExceeded(Exception):
    """Raised when a template takes too long or builds too much text."""


class RenderingClock:
    """The processor time of all renderings for a prompt, which run in one thread."""

    def __init__(self) -> None:
        """Start the clock."""
        self._seconds_left = MAX_SECONDS
        self._latest = time.thread_time()

    def read_seconds_left(self) -> float:
        """Return the seconds until the time limit, negative after it."""
        now = time.thread_time()
        self._seconds_left -= min(now - self._latest, MAX_STEP_SECONDS)
        self._latest = now
        return self._seconds_left


class TemplateBudget(threading.local):
    """What is left of the limits: the time for all renderings for a prompt, and how many characters
    the present one may still build. An item of a list counts as one character. Each thread has its
    own.
    """

    def __init__(self) -> None:
        """Start a clock, without a budget of characters. Each thread calls this."""
        self.clock = RenderingClock()
        self.characters_left = 0

    def start_prompt(self, clock: RenderingClock | None = None) -> None:
        """Set the clock of the renderings that follow. None: a new one."""
        self.clock = RenderingClock() if clock is None else clock

    def start_rendering(self, characters: int) -> None:
        """Set what the rendering of a conversation of `characters` characters may build."""
        self.characters_left = BUDGET_FACTOR * (MAX_CHARACTERS + characters)

    def check_time(self) -> None:
        """Raise TemplateBudgetExceeded after the time limit."""
        if self.clock.read_seconds_left() < 0:
            raise TemplateBudgetExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def charge(self, amount: int) -> None:
        """Take `amount` characters from the budget, before they are built. Raises
        TemplateBudgetExceeded when the budget or the time is used up.
        """
        self.characters_left -= max(0, amount)
        if self.characters_left < 0:
            raise TemplateBudgetExceeded("a loop, list or text is too large")
        self.check_time()

    def charge_text_of(self, *values: Any, factor: int = 1) -> None:
        """Charge `factor` times the characters that `values` have as text. Nested lists are
        followed, because a short list may contain the same long text many times. Python writes a
        text in a list with escapes, up to ten characters for one.
        """
        stack, size = [], 0
        for value in values:
            if isinstance(value, str):
                size += text_size(value)
            elif not isinstance(value, SCALARS):
                stack.append(value)
        self.charge(factor * size)
        size = 0
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                size += text_size(value) * (1 if value.isprintable() else 10)
            elif isinstance(value, Mapping):
                size += ENTRY_COST * len(value)
                stack += [*value.keys(), *value.values()]
            elif is_container(value):
                size += ENTRY_COST * len(value)
                stack += list(value)
            elif not isinstance(value, SCALARS):
                stack += _attributes(value)
            if size > CHARGED_AT_ONCE:
                self.charge(factor * size)
                size = 0
        self.charge(factor * size)

    def charge_comparison(self, left: Any, right: Any) -> None:
        """Charge a comparison of two values for equality or order."""
        if isinstance(left, str) and isinstance(right, str):
            self.charge(min(len(left), len(right)) // SCAN_RATE)
        elif left is not right and is_container(left) and is_container(right):
            if len(left) and len(right):
                self.charge_text_of(left)
        else:
            check_integer(left, right)

    def charge_search(self, item: Any, values: Any) -> None:
        """Charge a search for `item` in a text, list or dictionary."""
        if isinstance(values, str):
            self.charge(len(values) // SCAN_RATE)
        elif isinstance(values, (Mapping, KeysView, Set)):
            self.check_key(item)
        elif is_container(values):  # a list, tuple or view
            self.check_key(item)
            self.charge(ENTRY_COST * len(values))
            if is_container(item):
                self.charge_text_of(item, factor=len(values))
            elif isinstance(item, str):
                equally_long = sum(isinstance(v, str) and len(v) == len(item) for v in values)
                self.charge(equally_long * len(item) // SCAN_RATE)

    def check_key(self, key: Any) -> None:
        """Raise TemplateBudgetExceeded if a key of a dictionary is a tuple that contains tuples.
        Its hash could take exponential time, or overflow the stack of the processor.
        """
        if isinstance(key, tuple):
            self.charge(ENTRY_COST * len(key))
            if any(isinstance(part, tuple) for part in key):
                raise TemplateBudgetExceeded("a key of a dictionary is a nested tuple")

    def check_entries(self, values: Any) -> None:
        """Charge the entries of a value and of all values inside it, which become keys of a
        dictionary. Raises TemplateBudgetExceeded as `check_key`.
        """
        stack, count = [values], 0
        while stack:
            value = stack.pop()
            self.check_key(value)
            count += 1
            if is_container(value):
                self.charge(ENTRY_COST * len(value))
                stack += value.values() if isinstance(value, Mapping) else value
            elif count % CHARGED_AT_ONCE == 0:
                self.check_time()


class LazyItems:
    """An iterator of a filter that computes its items when they are read. Each item is charged.

    An iterator may be made from another one. The length of such a chain is limited, because Python
    follows it on the stack of the processor.
    """

    def __init__(self, budget: TemplateBudget, items: Iterator[Any], source: Any = None) -> None:
        """`source`: the value that `items` reads."""
        self._budget, self._items = budget, items
        self.depth: int = source.depth + 1 if isinstance(source, LazyItems) else 1
        if self.depth > MAX_CHAINED_ITERATORS:
            raise TemplateBudgetExceeded("too many filters are chained")

    def __iter__(self) -> "LazyItems":
        return self

    def __next__(self) -> Any:
        self._budget.charge(ENTRY_COST)
        return next(self._items)


def text_size(text: str) -> int:
    """Return what a text is charged as: its characters, and its spans if it is a TrackedText."""
    return len(text) + ITEM_COST * len(getattr(text, "spans", ()))


def is_container(value: Any) -> TypeGuard[Collection[Any]]:
    """Return whether a value may contain others, which Python follows when it compares, hashes or
    prints the value.
    """
    return isinstance(value, (list, tuple, Mapping, Set, MappingView))


def check_integer(*values: Any) -> None:
    """Raise TemplateBudgetExceeded if one of `values` is a huge integer."""
    for value in values:
        if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise TemplateBudgetExceeded("a number is too large")


def _attributes(value: Any) -> tuple[Any, ...]:
    """Return the attributes of a Jinja namespace, which are private; nothing for another value."""
    from jinja2.utils import Namespace

    if isinstance(value, Namespace):
        return (object.__getattribute__(value, "_Namespace__attrs"),)
    return ()
