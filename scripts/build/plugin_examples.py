#!/usr/bin/env python3
"""Copy the example plug-ins of tests/plugins/ into docs/contributing.md.

usage: .venv/bin/python scripts/build/plugin_examples.py

The examples are Python files, so that the formatter, renames and tests reach them. In the page, an
HTML comment before a code block names the file that the block shows.
"""

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing.md"
BLOCK = re.compile(r"(?ms)^(<!-- plugin: \S+ from (\S+) -->\n```python\n).*?^```$")


def main() -> None:
    """Write the page, or print the usage if there is any argument."""
    if sys.argv[1:]:
        print(inspect.cleandoc(__doc__ or "").split("\n\n", 1)[1])
        return
    PAGE.write_text(insert_examples(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def insert_examples(page: str) -> str:
    """Return the page with every example's code block replaced by the contents of its file."""
    return BLOCK.sub(lambda match: f"{match[1]}{(ROOT / match[2]).read_text()}```", page)


if __name__ == "__main__":
    main()
