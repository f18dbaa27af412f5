"""Dataclasses are encoded as JSON and parsed again, with keys that differ from the field names."""

import json
from dataclasses import dataclass, field

import pytest

from quant.json_dataclasses import encode_value, json_key, parse_json


@dataclass(frozen=True)
class Speed:
    quantized: float = field(metadata=json_key("made"))
    span: tuple[float, ...] = ()


@dataclass(frozen=True)
class Report:
    speeds: tuple[Speed, ...]
    counts: dict[str, int]
    note: str | None = None


REPORT = Report((Speed(1.5, (1.0, 2.0)),), {"F16": 3})


def test_field_with_another_key() -> None:
    document = encode_value(REPORT)
    assert document == {
        "speeds": [{"made": 1.5, "span": [1.0, 2.0]}],
        "counts": {"F16": 3},
        "note": None,
    }
    assert parse_json(Report, json.dumps(document), 1000) == REPORT


def test_errors_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"speeds\[0\]\.made is missing"):
        parse_json(Report, '{"speeds": [{"quantized": 1.5}], "counts": {}}', 1000)
