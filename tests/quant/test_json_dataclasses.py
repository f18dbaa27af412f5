"""Dataclasses are encoded as JSON and parsed again. Damaged and hostile JSON is always a ValueError,
and never another exception.
"""

import contextlib
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from quant.json_dataclasses import (
    MAX_DEPTH,
    decode_value,
    encode_value,
    json_key,
    parse_json,
    parse_object,
    parse_value,
    read_file,
    read_json,
)
from scripts.fuzz.json_mutations import mutate_json


@dataclass(frozen=True)
class Speed:
    quantized: float = field(metadata=json_key("made"))
    span: tuple[float, ...] = ()


@dataclass(frozen=True)
class Report:
    speeds: tuple[Speed, ...]
    counts: dict[str, int]
    note: str | None = None
    kind: Literal["a", 1] = "a"
    pair: tuple[str, int] = ("", 0)
    more: Mapping[str, Any] = field(default_factory=dict)
    either: int | str = 0


REPORT = Report(
    (Speed(1.5, (1.0, 2.0)),), {"F16": 3}, kind=1, pair=("x", 2), more={"y": [None]}, either="z"
)


def test_field_with_another_key() -> None:
    document = encode_value(REPORT)
    assert document["speeds"] == [{"made": 1.5, "span": [1.0, 2.0]}]
    assert parse_json(Report, json.dumps(document), 1000) == REPORT


def test_errors_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"speeds\[0\]\.made is missing"):
        parse_json(Report, '{"speeds": [{"quantized": 1.5}], "counts": {}}', 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speeds": {}}, "speeds is not a list"),
        ({"speeds": [1]}, r"speeds\[0\] is not an object"),
        ({"counts": []}, "counts is not an object"),
        ({"counts": {"x": True}}, r"counts\.x is not of type int"),
        ({"counts": {"x": 2**63}}, r"counts\.x is not of type int"),
        ({"note": 1}, "note is not of type str"),
        ({"kind": True}, "kind is none of 'a', 1"),
        ({"kind": []}, "kind is none of 'a', 1"),
        ({"pair": ["x"]}, "pair has 1 items instead of 2"),
        ({"pair": ["x", "y"]}, r"pair\[1\] is not of type int"),
        ({"either": None}, "either is not of type str"),
        ({"either": []}, "either is not of type str"),
    ],
)
def test_a_value_of_another_type_is_refused(change: dict[str, Any], message: str) -> None:
    document = {**encode_value(REPORT), **change}
    with pytest.raises(ValueError, match=message):
        parse_json(Report, json.dumps(document), 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
        ("NaN", "NaN is no number"),
        ("-Infinity", "is no number"),
        ("1e999", "too large a number"),
        ("1" * 5000, "too large a number"),
        ("1" * 21, "too large a number"),
        ('"\\ud800"', "surrogates not allowed"),
        ('{"\\udbff": 1}', "surrogates not allowed"),
        ("", "it is not JSON: Expecting value"),
        ("{} {}", "it is not JSON: Extra data"),
        ("x" * 1_000_001, "1,000,001 characters, more than 1,000,000"),
    ],
)
def test_hostile_json_is_a_value_error(text: str, message: str) -> None:
    for raw in (text, text.encode()):
        with pytest.raises(ValueError, match=message):
            parse_value(raw, 1_000_000)


def test_json_within_the_limits_is_read() -> None:
    assert parse_value(b"\xef\xbb\xbf[1]", 10) == [1]
    assert parse_value("[" * MAX_DEPTH + "]" * MAX_DEPTH, 200)
    assert parse_value('"\\ud83d\\ude00 \\udce9.gguf"', 100) == "😀 \udce9.gguf"
    assert parse_object(b'{"a": "\xff"}', 100, decode_errors="replace") == {"a": "�"}
    with pytest.raises(ValueError, match="can't decode byte"):
        parse_object(b'{"a": "\xff"}', 100)
    with pytest.raises(ValueError, match="it is not a JSON object"):
        parse_object(b"[]", 100)


def test_a_file_is_read_within_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(encode_value(REPORT)))
    assert read_json(Report, file, 1000) == REPORT
    with pytest.raises(ValueError, match="it has more than 10 bytes"):
        read_file(file, 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nothing", 10)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            read_file(other, 10)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_documents_are_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    raw = json.dumps(encode_value(REPORT)).encode()
    for _ in range(300):
        mutated, _ = mutate_json(raw, rng)
        with contextlib.suppress(ValueError):
            report = parse_json(Report, mutated, 1 << 22)
            assert decode_value(Report, encode_value(report), "") == report
