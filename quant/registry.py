"""Finds plug-ins: every module of a package may export a tuple of items, and `collect` merges these
tuples into one dictionary.
"""

import importlib
import pkgutil
from typing import Any


def collect(package: str, attr: str, key: str = "name") -> dict[Any, Any]:
    """Import all modules of `package`, and merge their tuples named `attr` (such as "ARCHS") into
    one dictionary. Its keys are the items' attribute named `key`.

    Modules without such a tuple are skipped. Raises ValueError if two items have the same key.
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
