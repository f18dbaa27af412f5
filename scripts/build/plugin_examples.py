#!/usr/bin/env python3
"""Copy the example plug-ins of tests/plugins/ into docs/contributing.md.

usage: .venv/bin/python scripts/build/plugin_examples.py [--check]

The examples are Python files, so that the formatter, renames and tests reach them. In the page, an
HTML comment before a code block names the file that the block shows. With --check nothing is
written, and the exit code is 1 if the page is out of date.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.build.generated_page import ROOT, update_page

PAGE = ROOT / "docs" / "contributing.md"
BLOCK = re.compile(r"(?ms)^(<!-- plugin: \S+ from (\S+) -->\n```python\n).*?^```$")


def insert_examples(page: str) -> str:
    """Return the page with every example's code block replaced by the contents of its file."""
    return BLOCK.sub(lambda match: f"{match[1]}{(ROOT / match[2]).read_text()}```", page)


if __name__ == "__main__":
    update_page(__doc__ or "", PAGE, lambda: insert_examples(PAGE.read_text(encoding="utf-8")))
