"""A batch's input: accepted lines, and errors for invalid ones."""

import gzip
import hashlib
import io
from pathlib import Path

import pytest

from llmcli.api.errors import ApiError
from llmcli.batch import input_lines
from llmcli.batch.input_lines import BatchInput, InputLine, open_input
from llmcli.batch.request_line import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    DamagedLine,
    duplicate_ids,
    parse_line,
)
from llmcli.errors import UserError


def given(raw: bytes) -> BatchInput:
    return BatchInput(io.BytesIO(raw), "in.jsonl")


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
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 8)
    monkeypatch.setattr(input_lines, "READ_BYTES", 3)
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
    with open_input(str(tmp_path / "in.gz"), tmp_path) as source:
        assert source.survey().count == 2000
        assert sum(1 for _ in source.lines()) == 2000
    (tmp_path / "cut").write_bytes(packed[:-9])
    with (
        open_input(str(tmp_path / "cut"), tmp_path) as source,
        pytest.raises(UserError, match="damaged gzip"),
    ):
        source.survey()
    with (
        pytest.raises(UserError, match="cannot read"),
        open_input(str(tmp_path / "none"), tmp_path),
    ):
        pass


def test_lines_of_one_name_are_found() -> None:
    raw = b'{"custom_id": "a", "prompt": "1"}\n"2"\nno json\n{"custom_id": "a", "prompt": ""}\n{"custom_id":"line-2"}\n'
    assert duplicate_ids(given(raw).lines()) == [("a", 1, 4), ("line-2", 2, 5)]


@pytest.mark.parametrize(
    ("raw", "url", "name", "body"),
    [
        (b'"hi"', CHAT_PATH, "line-7", {"messages": [{"role": "user", "content": "hi"}]}),
        (
            b'{"prompt": "hi", "max_tokens": 3, "custom_id": "x"}',
            CHAT_PATH,
            "x",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        ),
        (b'{"messages": [], "custom_id": 3}', CHAT_PATH, "line-7", {"messages": []}),
        (
            b'{"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}',
            COMPLETIONS_PATH,
            "y",
            {"prompt": "a"},
        ),
    ],
)
def test_forms_are_told_apart(raw: bytes, url: str, name: str, body: object) -> None:
    found = parse_line(InputLine(0, 7, raw), has_template=True)
    assert (found.url, found.custom_id, found.body) == (url, name, body)


def test_a_base_model_goes_on_with_a_prompt() -> None:
    assert parse_line(InputLine(0, 1, b'"hi"'), has_template=False).url == COMPLETIONS_PATH


@pytest.mark.parametrize(
    ("raw", "kind", "told"),
    [
        (b"{bad", DamagedLine, "line 7 is not JSON"),
        (b'"\xff"', DamagedLine, "line 7 is not UTF-8 text: byte 1 is 0xff"),
        (b"[" * 100_000, DamagedLine, "line 7 is nested too deeply"),
        (b'{"prompt": NaN}', DamagedLine, "NaN is no number of JSON"),
        (b'{"prompt": "x", "metadata": {"a": 1e999}}', DamagedLine, "1e999 is too large a number"),
        (b"[1]", ApiError, "line 7 must be an object or text, not a list"),
        (b'{"a": 1}', ApiError, "line 7 has no request"),
        (b'{"url": "/v1/x"}', ApiError, "body is missing"),
        (b'{"method": "GET", "url": "/v1/x", "body": {}}', ApiError, "method must be POST"),
        (b'{"url": 3, "body": {}}', ApiError, "url must be text"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(raw: bytes, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        parse_line(InputLine(0, 7, raw), has_template=True)


def test_a_line_too_long_is_damaged() -> None:
    with pytest.raises(DamagedLine, match="line 7 has 100,000,000 bytes"):
        parse_line(InputLine(0, 7, b"", 100_000_000), has_template=True)
