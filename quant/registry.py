"""A folder is a registry: each module in it exports one tuple, and collect() reads them."""

import importlib
import pkgutil
from typing import Any


def collect(package: str, attr: str, key: str = "name") -> dict[Any, Any]:
    """Gather `attr` from every module of `package`, keyed by an attribute; a clash of keys is a
    bug.
    """
    table: dict[str, Any] = {}
    for info in sorted(
        pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda m: m.name
    ):
        module = importlib.import_module(f"{package}.{info.name}")
        for item in getattr(module, attr, ()):
            name = getattr(item, key)
            if name in table:
                raise ValueError(f"{attr}: {name!r} is defined twice, again in {module.__name__}")
            table[name] = item
    return table
