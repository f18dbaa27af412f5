"""The values of the keyword `format`."""

import json
import re
from datetime import date

import pytest

from llmcli.runtime.constraint.base import accepts
from llmcli.runtime.constraint.json_schema.formats import DATE, NATIVE_FORMATS, STRING_FORMATS
from tests.runtime.constraint.words import schema

SAMPLES = {
    "uri-template": (["/a/{b}", "x{?y,z*}"], ["{", "{a b}"]),
    "iri": (["https://größe.example/ä"], ["größe", "https://a b"]),
    "iri-reference": (["/größe"], ["a b"]),
    "idn-email": (["jörg@example.org"], ["jörg"]),
    "json-pointer": (["", "/a/b~0"], ["a", "/~"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "01"]),
    "ipv4network": (["10.0.0.0/8"], ["10.0.0.0", "10.0.0.0/33"]),
    "ipv6network": (["::/0", "fe80::1/64"], ["::/129"]),
    "ipvanyaddress": (["::1", "1.2.3.4"], ["1.2.3", "1:2"]),
    "uuid4": (["9f8b2c1e-3c4d-4a5b-8c7d-0123456789ab"], ["9f8b2c1e-3c4d-1a5b-8c7d-0123456789ab"]),
    "base64": (["", "QUI="], ["QUI", "Q?=="]),
    "color": (["#fff", "#00FF00"], ["red", "#ffff"]),
    "e164": (["+4922812345"], ["022812345"]),
    "ulid": (["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["81ARZ3NDEKTSV4RRFFQ69G5FAV"]),
    "hostname": (["a-b.example", "x--y"], ["-a", "xn--a", "a..b", "a" * 64, "a." * 130 + "a"]),
    "lowercase": (["größe 1"], ["Größe"]),
    "uppercase": (["GRÖSSE 1"], ["Größe"]),
    "mac": (["00:1b:44:11:3A:B7"], ["00-1b-44-11-3a-b7"]),
    "year-month": (["2024-02"], ["2024-13"]),
    "url": (["https://a.example/b?c=d"], ["a.example", "ftp://a.example"]),
}


@pytest.mark.parametrize("name", [*STRING_FORMATS, *sorted(NATIVE_FORMATS)])
def test_every_format_is_enforced(name: str) -> None:
    grammar = schema({"type": "string", "format": name}, is_strict=True)
    right, wrong = SAMPLES.get(name, ([], ["\n"]))
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            tokens = list(json.dumps(text, ensure_ascii=False).encode())
            assert accepts(grammar, tokens) == expected, text


def is_date(year: int, month: int, day: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar() -> None:
    for year in (0, 1, 4, 100, 400, 1896, 1900, 1999, 2000, 2023, 2024, 2100, 2400, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(re.fullmatch(DATE, text)) == is_date(year, month, day), text
