"""A short storm of scripts/soak.py on a server of the test's own: nothing wrong, nothing left behind."""

import asyncio
import importlib.util
import sys
from pathlib import Path

from tests.serve.conftest import Served

SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"


def test_a_mixed_load_is_answered_rightly_and_leaves_nothing(tiny: Served) -> None:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    soak = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    tally = asyncio.run(soak.storm(tiny.url, soak.kinds(True, 1), 30, 0.3, 0.1, 8, 1))
    assert tally.wrong == []
    assert tally.right + tally.left + tally.refused + sum(tally.differing.values()) == 30
    report = asyncio.run(soak.settled(tiny.url))
    assert [one for one in report["sequences"] if one["state"] == "running"] == []
