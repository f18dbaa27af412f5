"""The values of the keyword `format`."""

import json
import re
from datetime import date

import pytest

from llmcli.runtime.constraint.base import accepts
from llmcli.runtime.constraint.json_schema.formats import DATE, NATIVE_FORMATS, STRING_FORMATS
from tests.runtime.constraint.words import schema

UUIDS = ["9f8b2c1e-3c4d-1a5b-8c7d-0123456789ab"], ["9f8b2c1e3c4d1a5b8c7d0123456789ab", "9f8b2c1e"]
HOST_NAMES = ["a-b.example", "x--y"], ["-a", "xn--a", "a..b", "a" * 64, "a." * 130 + "a"]
ADDRESSES = ["::1", "1.2.3.4"], ["1.2.3", "1:2"]
NETWORKS_4 = ["10.0.0.0/8"], ["10.0.0.0", "10.0.0.0/33"]
NETWORKS_6 = ["::/0", "fe80::1/64"], ["::/129", "::"]
NETWORKS = ["10.0.0.0/8", "::/0"], ["10.0.0.0", "10.0.0.0/33", "::/129"]
BASE64 = ["", "QUI="], ["QUI", "Q?=="]
# Texts with each format, and texts without it.
SAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29"], ["2023-02-29", "2024-2-9"]),
    "time": (["23:59:59Z", "01:02:03.5+01:00"], ["24:00:00Z", "01:02:03", "01:02Z"]),
    "date-time": (["2024-02-29T23:59:59Z"], ["2024-02-29", "2023-02-29T00:00:00Z"]),
    "local-date-time": (["2024-02-29T23:59:59"], ["2024-02-29T23:59:59Z"]),
    "local-time": (["23:59:59.25"], ["23:59", "23:59:59Z"]),
    "year": (["0001", "2024"], ["0000", "24"]),
    "year-month": (["2024-02"], ["2024-13"]),
    "duration": (["P1Y2M3DT4H5M6S", "P2W"], ["P", "1Y"]),
    "uri": (["https://a.example/b?c#d", "urn:a:b"], ["/a", "https://a b"]),
    "uri-reference": (["/a/b?c", "//a.example", ""], ["a b", "\\"]),
    "uri-template": (["/a/{b}", "x{?y,z*}"], ["{", "{a b}"]),
    "iri": (["https://größe.example/ä"], ["größe", "https://a b"]),
    "iri-reference": (["/größe"], ["a b"]),
    "url": (["https://a.example/b?c=d"], ["a.example", "ftp://a.example"]),
    "email": (["a.b@example.org"], ["a", "@example.org"]),
    "idn-email": (["jörg@example.org"], ["jörg"]),
    "hostname": HOST_NAMES,
    "host-name": HOST_NAMES,
    "json-pointer": (["", "/a/b~0"], ["a", "/~"]),
    "json-pointer-uri-fragment": (["#", "#/a"], ["/a", "#/~"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "01"]),
    "uuid": UUIDS,
    "guid": UUIDS,
    "uuid4": (["9f8b2c1e-3c4d-4a5b-8c7d-0123456789ab"], ["9f8b2c1e-3c4d-1a5b-8c7d-0123456789ab"]),
    "byte": BASE64,
    "base64": BASE64,
    "base64url": (["", "a_-9"], ["a+", "QUI="]),
    "hex": (["", "0aF1"], ["0", "0g"]),
    "ipv4": (["1.2.3.4"], ["1.2.3", "1.2.3.256"]),
    "ipv6": (["::1", "1:2:3:4:5:6:7:8"], ["1:2", ":::"]),
    "ip": ADDRESSES,
    "ipvanyaddress": ADDRESSES,
    "ipv4network": NETWORKS_4,
    "ipv4interface": NETWORKS_4,
    "cidrv4": NETWORKS_4,
    "ipv6network": NETWORKS_6,
    "ipv6interface": NETWORKS_6,
    "cidrv6": NETWORKS_6,
    "ipvanynetwork": NETWORKS,
    "ipvanyinterface": NETWORKS,
    "mac": (["00:1b:44:11:3A:B7"], ["00-1b-44-11-3a-b7"]),
    "color": (["#fff", "#00FF00"], ["red", "#ffff"]),
    "e164": (["+4922812345"], ["022812345"]),
    "cuid": (["cjld2cjxh0000qzrmn831i7rn"], ["ajld2cjxh0000qzrmn831i7rn", "c"]),
    "cuid2": (["tz4a98xxat96iws9zmbrgj3a"], ["Tz4a98", "4a98xx"]),
    "ulid": (["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["81ARZ3NDEKTSV4RRFFQ69G5FAV"]),
    "xid": (["9m4e2mr0ui3e8a215n4g"], ["9m4e2mr0ui3e8a215n4z", "9m4e"]),
    "ksuid": (["0ujtsYcgvSTl8PAuAdqWYSMnLOv"], ["0ujtsYcgvSTl8PAuAdqWYSMnLO"]),
    "nanoid": (["V1StGXR8_Z5jdHi6B-myT"], ["V1StGXR8_Z5jdHi6B-my"]),
    "jwt": (["eyJ.e30.", "eyJ.e30.c2ln"], ["eyJ.e30", "eyJ"]),
    "lowercase": (["größe 1"], ["Größe"]),
    "uppercase": (["GRÖSSE 1"], ["Größe"]),
}


@pytest.mark.parametrize("name", [*STRING_FORMATS, *sorted(NATIVE_FORMATS)])
def test_every_format_is_enforced(name: str) -> None:
    grammar = schema({"type": "string", "format": name}, is_strict=True)
    right, wrong = SAMPLES[name]
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
