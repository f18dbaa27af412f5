"""Parse JSON strictly. Python's parser also accepts NaN, Infinity and numbers beyond the range of a
double, which could not be written back as valid JSON.
"""

import json
import math
from collections.abc import Callable
from typing import Any


def parse_strict_json(text: str | bytes, parse_int: Callable[[str], Any] = int) -> Any:
    """Return the value of a JSON text. `parse_int`: converts the digits of an integer.

    Raises ValueError for invalid JSON, for NaN and Infinity, and for numbers beyond the range of a
    double. Raises RecursionError if the text is nested too deeply.
    """
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=parse_finite_float, parse_int=parse_int
    )


def parse_finite_float(word: str) -> float:
    """Return a JSON number as a float. Raises ValueError if it is beyond the range of a double."""
    number = float(word)
    if math.isinf(number):
        raise ValueError(f"{word[:40]} is too large a number")
    return number


def _refuse_constant(word: str) -> None:
    """Raise ValueError for NaN, Infinity or -Infinity."""
    raise ValueError(f"{word} is no number of JSON")
