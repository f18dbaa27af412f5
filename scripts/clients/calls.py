"""Runs the calls of a client and prints {"call", "passed", "why"} for each.

Calls marked by `refuses` must be refused with a 4xx that explains why.
"""

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable
from typing import Any

CALLS: list[tuple[str, Callable[..., Any], bool]] = []


def call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a call that must work; the first line of its docstring is its name."""
    CALLS.append(((function.__doc__ or function.__name__).splitlines()[0], function, False))
    return function


def refuses(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a call that must be refused with an explanation."""
    CALLS.append(((function.__doc__ or function.__name__).splitlines()[0], function, True))
    return function


def run(*args: Any) -> None:
    """Run all calls with `args`; asynchronous ones share an event loop, as in a program."""
    with asyncio.Runner() as runner:
        _run(runner, args)


def _run(runner: asyncio.Runner, args: tuple[Any, ...]) -> None:
    for name, function, refused in CALLS:
        why, passed = "", not refused
        try:
            found = function(*args)
            if inspect.iscoroutine(found):
                runner.run(found)
            if refused:
                why = "it was not refused"
        except Exception as error:  # noqa: BLE001 - clients raise many types
            told = 400 <= getattr(error, "status_code", 0) < 500
            passed = refused and told
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = (
                str(error)[:300]
                if told
                else f"{type(error).__name__}: {str(error)[:300]} ({last.name}:{last.lineno})"
            )
        print(
            json.dumps({"call": name, "passed": passed, "why": why, "refused": refused}), flush=True
        )
