"""Large JSON is parsed in pieces: the results and the errors are those of Python's own parser, and no
piece takes long.
"""

import json
import random
import sys
import threading
import time
from typing import Any

import pytest

from llmcli.api import json_pieces
from llmcli.api.forms.base import encode_json
from llmcli.api.json_pieces import TooManyValues, encode_in_pieces, parse_in_pieces
from llmcli.strict_json import parse_strict_json


def outcome(parse: Any, raw: bytes) -> tuple[str, Any]:
    """Return the value, or the type and the text of the error."""
    try:
        return "value", parse(raw)
    except RecursionError:
        return "RecursionError", ""
    except (ValueError, UnicodeDecodeError) as error:
        return type(error).__name__, str(error)


def random_text(rng: random.Random, length: int) -> str:
    return "".join(
        rng.choice(["a", "é", "你", "🤗", '"', "\\", "\n", ",", "}", "],", '",', "\u2028", " "])
        for _ in range(length)
    )


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(9 if depth else 6)
    match kind:
        case 0:
            return rng.randrange(-10, 10**6)
        case 1:
            return rng.random() * 10 ** rng.randrange(-5, 5)
        case 2:
            return rng.choice([None, True, False])
        case 3 | 4:
            return random_text(rng, rng.choice([0, 1, 5, 90]))
        case 5:
            return [rng.randrange(100) for _ in range(rng.choice([0, 1, 200]))]
        case 6:
            count = rng.choice([0, 1, 3, 20])
            return [random_value(rng, depth - 1) for _ in range(count)]
    count = rng.choice([0, 1, 3, 20])
    return {random_text(rng, rng.randrange(4)): random_value(rng, depth - 1) for _ in range(count)}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 characters, so that short texts have many."""
    monkeypatch.setattr(json_pieces, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(json_pieces, "SHORT_CHARACTERS", 16)


def test_values_equal_those_of_pythons_parser() -> None:
    rng = random.Random(1)
    for number in range(600):
        value = random_value(rng, 4)
        indent = rng.choice([None, 0, 3])
        raw = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=indent).encode(
            rng.choice(["utf-8", "utf-8-sig", "utf-16"]) if number % 9 == 0 else "utf-8"
        )
        assert parse_in_pieces(raw) == json.loads(raw) == value


def test_errors_equal_those_of_pythons_parser() -> None:
    rng = random.Random(2)
    n_wrong = 0
    for _ in range(3000):
        raw = bytearray(json.dumps(random_value(rng, 3), ensure_ascii=rng.random() < 0.5).encode())
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(raw) + 1)
            match rng.randrange(3):
                case 0:
                    raw[at : at + 1] = b""
                case 1:
                    raw[at:at] = rng.choice(
                        [b'"', b"\\", b",", b"}", b"]", b"{", b"[", b":", b"NaN", b"1e999", b"\xff"]
                    )
                case 2:
                    del raw[at:]
        found, expected = (
            outcome(parse, bytes(raw)) for parse in (parse_in_pieces, parse_strict_json)
        )
        n_wrong += expected[0] != "value"
        assert found[0] == expected[0], (bytes(raw), found, expected)
        if expected[0] in ("value", "JSONDecodeError", "UnicodeDecodeError"):
            assert found == expected, bytes(raw)
    assert n_wrong > 2000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"[1] 2",
        b"[1,]",
        b'{"a":1,}',
        b'{"a" 1}',
        b"{a:1}",
        b'"' + b"x" * 100,
        b'"' + b"x" * 100 + b'\n"',
        b'"' + b"x" * 100 + b'\\q"',
        b'"' + b"\\ud83d" * 20 + b'\\ude00"',
        b'"' + b"x" * 57 + b'\\ud83d\\ude00"',
        b'"' + b"x" * 59 + b'\\ud83d"',
        b'"' + b"\\\\" * 99 + b'"',
        b"[" + b"12345678," * 30 + b"9]",
        b"1" * 100,
        b"[" + b"1" * 5000 + b"]",
        b"[" * 100 + b" " * 100,
        b'{"a":' * 100,
    ],
)
def test_ends_inside_and_between_pieces(raw: bytes) -> None:
    assert outcome(parse_in_pieces, raw) == outcome(parse_strict_json, raw)


def test_too_deep_nesting_is_refused_and_not_a_crash() -> None:
    for opening in (b"[", b'{"a":'):
        raw = opening * 100_000
        assert outcome(parse_in_pieces, raw)[0] == "RecursionError"


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "MAX_VALUES", 1000)
    monkeypatch.setattr(json_pieces, "MAX_CONTAINERS", 100)
    for value in ([[]] * 101, [1] * 1001, [{"a": 1}] * 101, {str(n): n for n in range(1001)}):
        with pytest.raises(TooManyValues, match="more than 1,000 values, or 100 lists"):
            parse_in_pieces(json.dumps(value).encode())
    # brackets and commas in a text are no values
    text = "[{,}]" * 1000
    assert parse_in_pieces(json.dumps([text, [1] * 900]).encode()) == [text, [1] * 900]


def test_what_is_written_equals_pythons_json() -> None:
    rng = random.Random(3)
    for _ in range(300):
        value = random_value(rng, 4)
        assert encode_in_pieces(value) == encode_json(value)
    values = [*range(3000), [0.5] * 3000, {"a": []}, *range(2000)]
    assert encode_in_pieces(values) == encode_json(values)


BODIES = {
    "numbers": ('{"a":[', "12345678,", "1]}"),
    "objects": ('{"a":[', '{"role":"user","content":"' + "x" * 130 + '"},', "{}]}"),
    "members": ("{", '"key":1,', '"a":1}'),
    "escapes": ('{"a":"', "\\u4f60", '"}'),
    "text": ('{"a":"', "The quick brown fox\\n", '"}'),
}


@pytest.mark.parametrize("name", BODIES)
def test_another_thread_is_never_blocked_for_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest time for which the parser computes while this thread wants to run. It is the
    processor's time of the parser, so that the load of the machine does not matter.
    """
    monkeypatch.undo()
    before, unit, after = BODIES[name]
    raw = (before + unit * ((8 << 20) // len(unit) - 20) + after).encode()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        blocked = min(longest_block(raw) for _ in range(3))
    finally:
        sys.setswitchinterval(interval)
    assert blocked < 0.05, name  # parsed at once, the lists take 60 to 400 ms


def longest_block(raw: bytes) -> float:
    result: list[Any] = []
    may_end = threading.Event()

    def parse() -> None:
        result.append(parse_in_pieces(raw))
        may_end.wait()  # the clock of a thread ends with it

    parser = threading.Thread(target=parse)
    parser.start()
    clock = time.pthread_getcpuclockid(parser.ident or 0)
    longest = last = 0.0
    while parser.is_alive() and not result:
        now = time.clock_gettime(clock)
        longest, last = max(longest, now - last), now
        parser.join(0.0002)
    may_end.set()
    parser.join()
    assert result
    return longest
