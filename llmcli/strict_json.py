"""Strict JSON: rejects NaN, Infinity and numbers beyond the range of a double.

Python accepts these when reading, but could not write them back as valid JSON.
"""

import json
import math
from collections.abc import Callable
from typing import Any


def strict(text: str | bytes, whole: Callable[[str], Any] = int) -> Any:
    """Parse JSON text; integers are converted by `whole`.

    Raises ValueError and RecursionError.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=finite, parse_int=whole)


def finite(word: str) -> float:
    """Parse a float. Raises ValueError if it is beyond the range of a double."""
    number = float(word)
    if math.isinf(number):
        raise ValueError(f"{word[:40]} is too large a number")
    return number


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
