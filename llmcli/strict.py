"""JSON as its standard has it: without what Python alone takes for JSON, and without numbers beyond
a double's, which told back would be no JSON.
"""

import json
import math
from collections.abc import Callable
from typing import Any


def strict(text: str | bytes, whole: Callable[[str], Any] = int) -> Any:
    """The value of a JSON text, whole numbers read by `whole`. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=_no_number, parse_float=finite, parse_int=whole)


def finite(word: str) -> float:
    """A number; raises ValueError where it is beyond a double's."""
    number = float(word)
    if math.isinf(number):
        raise ValueError(f"{word[:40]} is too large a number")
    return number


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
