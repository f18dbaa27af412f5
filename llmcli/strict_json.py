"""Parse JSON strictly. Python's parser also accepts NaN, Infinity and numbers beyond the range of a
double, which could not be written back as valid JSON.

This is for JSON of other programs, such as requests and schemas. Files that llmcli writes itself
are read by quant/json_dataclasses.py, which limits them in size and depth, and checks their types.
"""

import json
from collections.abc import Callable
from typing import Any

from quant.json_dataclasses import parse_finite_float as parse_finite_float
from quant.json_dataclasses import refuse_constant


def parse_strict_json(text: str | bytes, parse_int: Callable[[str], Any] = int) -> Any:
    """Return the value of a JSON text. `parse_int`: converts the digits of an integer.

    Raises ValueError for invalid JSON, for NaN and Infinity, and for numbers beyond the range of a
    double. Raises RecursionError if the text is nested too deeply.
    """
    return json.loads(
        text, parse_constant=refuse_constant, parse_float=parse_finite_float, parse_int=parse_int
    )
