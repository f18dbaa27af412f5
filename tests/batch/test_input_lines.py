"""Input of a batch: reading lines from files, and parsing them into requests or errors."""

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


def batch_input(raw: bytes) -> BatchInput:
    return BatchInput(io.BytesIO(raw), "in.jsonl")


def test_blank_lines_have_a_number_but_no_index() -> None:
    source = batch_input(b'\xef\xbb\xbf"a"\n\n  \r\n"b"\r\n"c"')
    assert [(line.index, line.number, line.raw) for line in source.lines()] == [
        (0, 1, b'"a"'),
        (1, 4, b'"b"'),
        (2, 5, b'"c"'),
    ]
    survey = source.survey()
    assert (survey.count, survey.unended) == (3, 5)
    assert batch_input(b'"a"\n').survey().unended == 0
    assert batch_input(b"").survey().count == 0
    for raw in (b"\xef\xbb\xbf", b'\xef\xbb\xbf\n"a"\n'):  # survey() and lines() must agree
        n_lines = len(list(batch_input(raw).lines()))
        assert batch_input(raw).survey().count == n_lines == raw.count(b"a")


def test_a_line_that_is_too_long_has_a_size_and_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINE_BYTES", 8)
    monkeypatch.setattr(input_lines, "READ_BYTES", 3)
    raw = b'"a"\n"' + b"x" * 20 + b'"\n"1234"\n'
    source = batch_input(raw)
    assert [(line.number, line.raw, line.too_long) for line in source.lines()] == [
        (1, b'"a"', 0),
        (2, b"", 23),
        (3, b'"1234"', 0),
    ]
    assert source.survey().sha256 == hashlib.sha256(raw).hexdigest()
    assert source.survey().count == 3


def test_gzip_is_decompressed_and_cut_off_gzip_raises_an_error(tmp_path: Path) -> None:
    compressed = gzip.compress(b'"a"\n"b"\n' * 1000)
    (tmp_path / "in.gz").write_bytes(compressed)
    with open_input(str(tmp_path / "in.gz"), tmp_path) as source:
        assert source.survey().count == 2000
        assert sum(1 for _ in source.lines()) == 2000
    (tmp_path / "cut").write_bytes(compressed[:-9])
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


def test_duplicate_ids_finds_repeated_names() -> None:
    raw = (
        b'{"custom_id": "a", "prompt": "1"}\n"2"\nno json\n'
        b'{"custom_id": "a", "prompt": ""}\n{"custom_id":"line-2"}\n'
    )
    assert duplicate_ids(batch_input(raw).lines()) == [("a", 1, 4), ("line-2", 2, 5)]


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
            b'{"custom_id": "y", "method": "POST", "url": "/v1/completions",'
            b' "body": {"prompt": "a"}}',
            COMPLETIONS_PATH,
            "y",
            {"prompt": "a"},
        ),
    ],
)
def test_every_accepted_format_of_a_line(raw: bytes, url: str, name: str, body: object) -> None:
    request = parse_line(InputLine(0, 7, raw), has_template=True)
    assert (request.url, request.custom_id, request.body) == (url, name, body)


def test_without_a_chat_template_a_prompt_is_a_text_to_continue() -> None:
    assert parse_line(InputLine(0, 1, b'"hi"'), has_template=False).url == COMPLETIONS_PATH


@pytest.mark.parametrize(
    ("raw", "error_class", "message"),
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
def test_an_invalid_line_raises_an_error(
    raw: bytes, error_class: type[Exception], message: str
) -> None:
    with pytest.raises(error_class, match=message):
        parse_line(InputLine(0, 7, raw), has_template=True)


def test_a_line_that_is_too_long_raises_an_error_with_its_size() -> None:
    with pytest.raises(DamagedLine, match="line 7 has 100,000,000 bytes"):
        parse_line(InputLine(0, 7, b"", 100_000_000), has_template=True)
