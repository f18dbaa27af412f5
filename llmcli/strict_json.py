"""Strict JSON: rejects NaN, Infinity and numbers beyond the range of a double.

Python's parser accepts all three, but Python could not write them back as valid JSON.
"""

import json
import math
from collections.abc import Callable
from typing import Any


def parse_strict_json(text: str | bytes, parse_int: Callable[[str], Any] = int) -> Any:
    """Parse JSON text; integers are converted by `parse_int`.

    Raises ValueError for invalid JSON, and RecursionError if it is nested too deeply.
    """
    return json.loads(
        text, parse_constant=_no_number, parse_float=parse_finite_float, parse_int=parse_int
    )


def parse_finite_float(word: str) -> float:
    """Parse a float. Raises ValueError if it is beyond the range of a double."""
    number = float(word)
    if math.isinf(number):
        raise ValueError(f"{word[:40]} is too large a number")
    return number


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
