"""A batch's input: what counts as a line, and what is said of odd ones."""

import gzip
import hashlib
import io
from pathlib import Path

import pytest

from llmcli.api.errors import Problem
from llmcli.batch import input_lines
from llmcli.batch.input_lines import Input, Line, opened
from llmcli.batch.request_line import CHAT, TEXT, Damaged, asked, twins
from llmcli.errors import UserError


def given(raw: bytes) -> Input:
    return Input(io.BytesIO(raw), "in.jsonl")


def test_blank_lines_count_as_numbers_only() -> None:
    source = given(b'\xef\xbb\xbf"a"\n\n  \r\n"b"\r\n"c"')
    assert [(line.index, line.number, line.raw) for line in source.lines()] == [
        (0, 1, b'"a"'),
        (1, 4, b'"b"'),
        (2, 5, b'"c"'),
    ]
    survey = source.survey()
    assert (survey.count, survey.unended) == (3, 5)
    assert given(b'"a"\n').survey().unended == 0
    assert given(b"").survey().count == 0
    for raw in (b"\xef\xbb\xbf", b'\xef\xbb\xbf\n"a"\n'):  # both readings count the same lines
        assert given(raw).survey().count == len(list(given(raw).lines())) == raw.count(b"a")


def test_a_line_that_is_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MOST", 8)
    monkeypatch.setattr(input_lines, "PIECE", 3)
    raw = b'"a"\n"' + b"x" * 20 + b'"\n"1234"\n'
    source = given(raw)
    assert [(line.number, line.raw, line.too_long) for line in source.lines()] == [
        (1, b'"a"', 0),
        (2, b"", 23),
        (3, b'"1234"', 0),
    ]
    assert source.survey().sha256 == hashlib.sha256(raw).hexdigest()
    assert source.survey().count == 3


def test_gzip_is_read_as_it_is_and_told_where_it_is_cut(tmp_path: Path) -> None:
    packed = gzip.compress(b'"a"\n"b"\n' * 1000)
    (tmp_path / "in.gz").write_bytes(packed)
    with opened(str(tmp_path / "in.gz"), tmp_path) as source:
        assert source.survey().count == 2000
        assert sum(1 for _ in source.lines()) == 2000
    (tmp_path / "cut").write_bytes(packed[:-9])
    with (
        opened(str(tmp_path / "cut"), tmp_path) as source,
        pytest.raises(UserError, match="damaged gzip"),
    ):
        source.survey()
    with pytest.raises(UserError, match="cannot read"), opened(str(tmp_path / "none"), tmp_path):
        pass


def test_lines_of_one_name_are_found() -> None:
    raw = b'{"custom_id": "a", "prompt": "1"}\n"2"\nno json\n{"custom_id": "a", "prompt": ""}\n{"custom_id":"line-2"}\n'
    assert twins(given(raw).lines()) == [("a", 1, 4), ("line-2", 2, 5)]


@pytest.mark.parametrize(
    ("raw", "url", "name", "body"),
    [
        (b'"hi"', CHAT, "line-7", {"messages": [{"role": "user", "content": "hi"}]}),
        (
            b'{"prompt": "hi", "max_tokens": 3, "custom_id": "x"}',
            CHAT,
            "x",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        ),
        (b'{"messages": [], "custom_id": 3}', CHAT, "line-7", {"messages": []}),
        (
            b'{"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}',
            TEXT,
            "y",
            {"prompt": "a"},
        ),
    ],
)
def test_forms_are_told_apart(raw: bytes, url: str, name: str, body: object) -> None:
    found = asked(Line(0, 7, raw), templated=True)
    assert (found.url, found.custom_id, found.body) == (url, name, body)


def test_a_base_model_goes_on_with_a_prompt() -> None:
    assert asked(Line(0, 1, b'"hi"'), templated=False).url == TEXT


@pytest.mark.parametrize(
    ("raw", "kind", "told"),
    [
        (b"{bad", Damaged, "line 7 is not JSON"),
        (b'"\xff"', Damaged, "line 7 is not UTF-8 text: byte 1 is 0xff"),
        (b"[" * 100_000, Damaged, "line 7 is nested too deeply"),
        (b'{"prompt": NaN}', Damaged, "NaN is no number of JSON"),
        (b'{"prompt": "x", "metadata": {"a": 1e999}}', Damaged, "1e999 is too large a number"),
        (b"[1]", Problem, "line 7 must be an object or text, not a list"),
        (b'{"a": 1}', Problem, "line 7 has no request"),
        (b'{"url": "/v1/x"}', Problem, "body is missing"),
        (b'{"method": "GET", "url": "/v1/x", "body": {}}', Problem, "method must be POST"),
        (b'{"url": 3, "body": {}}', Problem, "url must be text"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(raw: bytes, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        asked(Line(0, 7, raw), templated=True)


def test_a_line_too_long_is_damaged() -> None:
    with pytest.raises(Damaged, match="line 7 has 100,000,000 bytes"):
        asked(Line(0, 7, b"", 100_000_000), templated=True)
