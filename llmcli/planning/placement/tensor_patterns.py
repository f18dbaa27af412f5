"""Patterns of tensor names (--override-tensor). llama.cpp reads them as regular expressions of C++
(ECMAScript). Only what means the same in Python is accepted, so that plans find the same tensors.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from llmcli.errors import UserError
from llmcli.runtime.binding.placement.model_placement import HOST_BUFFER, TensorOverride

MAX_PATTERN = 1024
ESCAPED = frozenset(".^$|()[]{}*+?\\/-_dDwWsSbB")
REPEAT = re.compile(r"[*+?]|\{\d{1,3}(?:,\d{0,3})?\}")


def check_pattern(pattern: str) -> None:
    """Raise UserError for a pattern that C++ refuses, or that it may read in another way than
    Python.
    """
    problem = _find_problem(pattern)
    if problem:
        raise UserError(
            f"--override-tensor: the pattern {pattern!r} {problem}",
            hint=r"a pattern is part of a tensor's name, such as blk\.1\.ffn or \.ffn_.*_exps",
        )


def matches_any(pattern: str, names: Iterable[str]) -> bool:
    """Return whether any of the names contains a match of a checked pattern."""
    return any(map(re.compile(pattern, re.ASCII).search, names))


def find_place(
    overrides: Sequence[TensorOverride], device_names: Sequence[str]
) -> Callable[[str], int | None]:
    """Return a function that returns the place of a tensor, by its name: the index of its device
    among `device_names`, -1 for the host, or None if no override matches. Raises UserError for a
    device that is not there.
    """
    missing = {entry.buffer for entry in overrides} - {HOST_BUFFER, *device_names}
    if missing:
        raise UserError(f"--override-tensor: there is no device {', '.join(sorted(missing))}")
    places = [
        (
            re.compile(override.pattern, re.ASCII),
            -1 if override.buffer == HOST_BUFFER else device_names.index(override.buffer),
        )
        for override in overrides
    ]
    return lambda name: next((place for pattern, place in places if pattern.search(name)), None)


def _find_problem(pattern: str) -> str:
    """Return in words why a pattern is not accepted; "" if it is."""
    if len(pattern) > MAX_PATTERN:
        return f"has more than {MAX_PATTERN} characters"
    if not pattern.isascii() or not pattern.isprintable():
        return "has characters that no tensor's name has"
    repeats = [False]  # for each open group, and outside: whether something in it is repeated
    was_repeated = False  # whether the group before has a repetition in it
    index, can_repeat = 0, False
    while index < len(pattern):
        char = pattern[index]
        found = REPEAT.match(pattern, index)
        index += 1
        is_group_end = False
        if char == "\\":
            if pattern[index : index + 1] not in ESCAPED or index == len(pattern):
                return f"has an unknown escape at character {index}"
            index += 1
            can_repeat = True
        elif char == "[":
            end = _end_of_class(pattern, index)
            if end is None:
                return f"has a set of characters that is not understood at character {index}"
            index, can_repeat = end, True
        elif char == "(":
            if pattern.startswith("?", index):
                if not pattern.startswith("?:", index):
                    return f"has a group of a kind that is not understood at character {index}"
                index += 2
            repeats.append(False)
            can_repeat = False
        elif char == ")":
            if len(repeats) == 1:
                return f"has no ( for the ) at character {index}"
            was_repeated = repeats.pop()
            repeats[-1] |= was_repeated
            can_repeat = is_group_end = True
        elif found:
            if not can_repeat:
                return f"repeats nothing at character {index}"
            if was_repeated:
                return f"repeats a repetition at character {index}"
            index = found.end() + pattern.startswith("?", found.end())
            repeats[-1], can_repeat = True, False
        elif char in "{}]":
            return rf"needs \{char} in place of the {char} at character {index}"
        else:
            can_repeat = char not in "^$|"
        was_repeated &= is_group_end
    if len(repeats) > 1:
        return "has a ( without its )"
    try:
        re.compile(pattern, re.ASCII)
    except (re.error, OverflowError) as error:
        return f"is not a regular expression: {error}"
    return ""


def _end_of_class(pattern: str, index: int) -> int | None:
    """Return the index after a set of characters that starts after `index`; None for a set that C++
    and Python may read differently.
    """
    body = re.compile(r"\^?(?:[A-Za-z0-9_.,/ -]|\\[.\\\-dws])+\]").match(pattern, index)
    return body.end() if body else None
