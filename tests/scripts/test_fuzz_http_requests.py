"""Some requests of scripts/fuzz/http_requests.py on a server of the test's own: each is answered or
refused.
"""

import asyncio
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.serve.http import routes
from tests.fixtures.server import CHAT, Served, serving
from tests.serve.http.test_errors import post

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz_requests.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("fuzz_requests", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["fuzz_requests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(stories_gguf: Path) -> Iterator[Served]:
    """stories260K, with room for tools."""
    options = RunOptions(ctx_size=2048, threads=1, threads_batch=1)
    with open_runner(stories_gguf, options, template=CHAT, slots=8, gpu_layers=0) as runner:
        with serving(runner, most_tokens=8) as served:
            yield served


def test_it_knows_every_path_that_takes_a_body(fuzz: ModuleType) -> None:
    taken = {route.path for route in routes.routes().values() if "POST" in route.methods}
    assert taken - {path for path, _ in fuzz.GOOD + fuzz.REFUSED} == set()


def test_what_it_begins_with_is_good(tiny: Served, fuzz: ModuleType) -> None:
    asked = [(path, fuzz.spelled(body)) for path, body in fuzz.GOOD]
    counts, found = asyncio.run(fuzz.fuzz(tiny.url, asked, 4))
    assert found == []
    assert {words.split()[1] for words in counts} == {"200"}, counts


def test_a_wrong_value_anywhere_is_answered_or_refused(tiny: Served, fuzz: ModuleType) -> None:
    asked = fuzz.cases()
    random.Random(5).shuffle(asked)
    counts, found = asyncio.run(fuzz.fuzz(tiny.url, asked[:150], 8))
    assert found == []
    assert sum(counts.values()) == 150


def test_it_tells_a_wrong_answer(fuzz: ModuleType) -> None:
    error = {"message": "m", "type": "t", "param": None, "code": None}
    assert fuzz.wrong("/", 400, json.dumps({"error": error}).encode()) == ""
    for status, raw in (
        (500, json.dumps({"error": error}).encode()),
        (200, b'{"a": NaN}'),
        (400, b"no"),
        (200, b'data: {"error": {"message": "x"}}\n\n'),
    ):
        assert fuzz.wrong("/", status, raw), (status, raw)


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "schema",
    [
        f'{{"const": {HUGE}}}',
        f'{{"required": [{{"x": {HUGE}}}]}}',
        f'{{"maximum": {HUGE}}}',
        f'{{"minLength": {HUGE}}}',
    ],
)
def test_numbers_in_a_schema_that_no_machine_has_are_refused(tiny: Served, schema: str) -> None:
    status, _, found = post(
        tiny, f'{{"prompt": "x", "json_schema": {schema}}}'.encode(), "/v1/completions"
    )
    assert (status, found["error"]["param"]) == (400, "json_schema"), found
