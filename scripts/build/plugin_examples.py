#!/usr/bin/env python3
"""Copy the example plug-ins of tests/plugins/ into docs/contributing.md.

usage: .venv/bin/python scripts/build/plugin_examples.py

The examples are Python files, so that the formatter and renames reach them. The comment before a
block names the file that it shows.
"""

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing.md"
BLOCK = re.compile(r"(?ms)^(<!-- plugin: \S+ from (\S+) -->\n```python\n).*?^```$")


def main() -> None:
    """Write the page."""
    if sys.argv[1:]:
        print(inspect.cleandoc(__doc__ or "").split("\n\n", 1)[1])
        return
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str) -> str:
    """Return the page with the present text of every example."""
    return BLOCK.sub(lambda match: f"{match[1]}{(ROOT / match[2]).read_text()}```", page)


if __name__ == "__main__":
    main()
