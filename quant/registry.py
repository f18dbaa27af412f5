"""Registries of modules in a package: each module exports a tuple, and `collect` merges the tuples."""

import importlib
import pkgutil
from typing import Any


def collect(package: str, attr: str, key: str = "name") -> dict[Any, Any]:
    """Return the items in the tuple `attr` of every module in `package`, by the items' attribute
    `key`.

    Modules without `attr` are skipped. Raises ValueError if two items have the same key.
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
