"""Registration and execution of the calls that check one client library.

Each `with_*.py` script registers functions by `call`, `call_each`, `refuses` and
`needs_only_model`, and runs them by `run`. For each function, one line of JSON is printed:
{"call", "passed", "why", "refused"}.

A script is called with the server's URL, the model to use, and the names of the server's other
models.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODEL, *OTHER_MODELS = sys.argv[2:] or ["local"]

CALLS: list[tuple[str, Callable[..., Any], bool]] = []


def call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function that must succeed. The first line of its docstring is its printed name.
    Use it as a decorator.
    """
    CALLS.append(((function.__doc__ or function.__name__).splitlines()[0], function, False))
    return function


def call_each(subject: str, names: dict[Callable[..., Any], str]) -> None:
    """Register functions that must succeed with one subject, such as a model class of the client.
    `names`: the part after the subject of their printed names.
    """
    CALLS.extend((f"{subject}: {name}", function, False) for function, name in names.items())


def refuses(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function whose request the server must refuse with a 4xx status, or 501, and an
    explanation. Use it as a decorator.
    """
    CALLS.append(((function.__doc__ or function.__name__).splitlines()[0], function, True))
    return function


def needs_only_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function that must succeed if the server has one model, and whose request it must
    refuse if it has several. Use it as a decorator.
    """
    return refuses(function) if OTHER_MODELS else call(function)


def run(*args: Any) -> None:
    """Call all registered functions with `args`, and print a line of JSON for each. Asynchronous
    functions share one event loop, as in a real program.
    """
    with asyncio.Runner() as runner:
        _run(runner, args)


def _run(runner: asyncio.Runner, args: tuple[Any, ...]) -> None:
    for name, function, refused in CALLS:
        why, passed = "", not refused
        try:
            returned = function(*args)
            if inspect.iscoroutine(returned):
                runner.run(returned)
            if refused:
                why = "it was not refused"
        except Exception as error:  # noqa: BLE001 - clients raise many types
            status = getattr(error, "status_code", 0)
            explained = 400 <= status < 500 or status == 501
            passed = refused and explained
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = (
                str(error)[:300]
                if explained
                else f"{type(error).__name__}: {str(error)[:300]} ({last.name}:{last.lineno})"
            )
        print(
            json.dumps({"call": name, "passed": passed, "why": why, "refused": refused}), flush=True
        )
