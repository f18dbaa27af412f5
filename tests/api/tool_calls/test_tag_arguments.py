"""Arguments between tags, in braces, or as Python keywords: they are converted to JSON while they
arrive, whatever they contain.
"""

import json
import random
from typing import Any

import pytest

from llmcli.api.conversation.output_splitter import OutputSplitter
from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.tool_calls import all_formats
from llmcli.api.tool_calls.base import ToolCallFormat, parse_arguments
from llmcli.api.tool_calls.tag_arguments import TagArguments
from tests.fixtures.tools import chat_tools

STRINGS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "any": {}, "count": {"type": "integer"}},
}
TOOLS = chat_tools({"type": "function", "function": {"name": "save", "parameters": STRINGS}})
TAG_FORMATS = {
    piece.name: piece for piece in all_formats() if isinstance(piece.argument_format, TagArguments)
}
MARK = "｜DSML｜"


def write_call(call_format: ToolCallFormat, values: dict[str, str]) -> str:
    """Return a call as the chat template of the format writes it."""
    name = call_format.name
    if name in ("coder", "seed"):
        inner = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
        )
        return f"{call_format.openings[0]}\n<function=save>\n{inner}</function>\n{call_format.closings[0]}"
    if name == "glm":
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in values.items()
        )
        return "<tool_call>save\n" + "".join(pairs) + "</tool_call>"
    prefix = MARK if name == "dsml" else ""
    inner = "".join(
        f'<{prefix}parameter name="{key}">{value}</{prefix}parameter>\n'
        for key, value in values.items()
    )
    return f'{call_format.openings[0]}\n<{prefix}invoke name="save">\n{inner}</{prefix}invoke>\n{call_format.closings[0]}'


def split_randomly(call_format: ToolCallFormat, text: str, seed: int) -> list[OutputPiece]:
    splitter, rng, out = (
        OutputSplitter(None, call_format, TOOLS.names, TOOLS.string_arguments),
        random.Random(seed),
        list[OutputPiece](),
    )
    while text:
        cut = rng.choice((1, 2, 5, 30, len(text)))
        out += splitter.feed(text[:cut])
        text = text[cut:]
    return out + splitter.finish()


def parse_calls(pieces: list[OutputPiece]) -> list[dict[str, Any] | None]:
    assert "".join(piece.text for piece in pieces if piece.kind == "content") == ""
    calls = [piece.call for piece in pieces if piece.kind == "call_end" and piece.call]
    assert "".join(piece.text for piece in pieces if piece.kind == "arguments") == "".join(
        piece.arguments for piece in calls
    )
    return [parse_arguments(piece) for piece in calls]


VALUES: dict[str, Any] = {
    "3": 3,
    "-2.5e3": -2500.0,
    "true": True,
    "null": None,
    '[1, {"a": "</b>"}]': [1, {"a": "</b>"}],
    '"q"': "q",
    "3 apples": "3 apples",
    "2026-11-22": "2026-11-22",
    "truely": "truely",
    "NaN": "NaN",
    "1e999": "1e999",
    "[not JSON": "[not JSON",
    '"a" and "b"': '"a" and "b"',
    "{": "{",
    "": "",
    'é \\ "\t.': 'é \\ "\t.',
    "a\n\n  b <c> </ d": "a\n\n  b <c> </ d",
    "if a < b:\n    print('</function>')": "if a < b:\n    print('</function>')",
    "</tool_call": "</tool_call",
    "<<</par": "<<</par",
}


@pytest.mark.parametrize("call_format", TAG_FORMATS.values(), ids=TAG_FORMATS.keys())
@pytest.mark.parametrize("value", VALUES)
def test_values_between_tags_are_parsed_for_any_split(
    call_format: ToolCallFormat, value: str
) -> None:
    text = write_call(call_format, {"any": value, "text": value, "count": "7"})
    stripped = value.strip() if call_format.name == "glm" else value
    for seed in range(6):
        found = parse_calls(split_randomly(call_format, text, seed))
        assert found == [{"any": VALUES[value], "text": stripped, "count": 7}], (seed, text)


@pytest.mark.parametrize("call_format", TAG_FORMATS.values(), ids=TAG_FORMATS.keys())
def test_strings_between_tags_are_streamed(call_format: ToolCallFormat) -> None:
    for key, text_part in (("text", "5 is a number, "), ("any", "one word and the next, ")):
        before, after = write_call(call_format, {key: text_part * 9 + "END"}).split("END")
        splitter = OutputSplitter(None, call_format, TOOLS.names, TOOLS.string_arguments)
        streamed = "".join(
            piece.text for piece in splitter.feed(before) if piece.kind == "arguments"
        )
        assert streamed == f'{{"{key}": "{text_part * 9}'.rstrip() + " " * (
            call_format.name != "glm"
        )
        remaining = [*splitter.feed("END" + after), *splitter.finish()]
        assert json.loads(streamed + "".join(piece.text for piece in remaining)) == {
            key: text_part * 9 + "END"
        }
    # an answer that is cut off ends with the arguments so far
    (call_end,) = (
        piece for piece in split_randomly(call_format, before, 1) if piece.kind == "call_end"
    )
    assert call_end.call and call_end.call.arguments == streamed


@pytest.mark.parametrize("call_format", TAG_FORMATS.values(), ids=TAG_FORMATS.keys())
def test_calls_without_arguments_and_adjacent_calls(call_format: ToolCallFormat) -> None:
    for text in (write_call(call_format, {}), write_call(call_format, {}).replace("\n", "")):
        assert parse_calls(split_randomly(call_format, f"{text}\n{text}", 3)) == [{}, {}]
    if call_format.argument_format and call_format.argument_format.next_call_pattern:
        first, second = (write_call(call_format, {"any": number}) for number in "12")
        adjacent = first.replace(call_format.closings[0], "") + second.replace(
            call_format.openings[0], ""
        )
        assert parse_calls(split_randomly(call_format, adjacent, 4)) == [{"any": 1}, {"any": 2}]


def test_the_next_tag_ends_a_value_without_a_closing_tag() -> None:
    call_format = TAG_FORMATS["coder"]
    text = "<tool_call><function=save><parameter=any>a<parameter=text>b\n</function> </tool_call>"
    for seed in range(6):
        assert parse_calls(split_randomly(call_format, text, seed)) == [{"any": "a", "text": "b"}]


BRACE_TEXT = (
    '{text:«a {b}: [c], "d"\\n», any:{x:[1,«», {}, true],«y z»:null} ,count: -2.5, more:word or two,zip:007,'
    "flat:[]}"
)
BRACE_VALUES = {
    "text": 'a {b}: [c], "d"\\n',
    "any": {"x": [1, "", {}, True], "y z": None},
    "count": -2.5,
    "more": "word or two",
    "zip": "007",
    "flat": [],
}


@pytest.mark.parametrize(("name", "mark"), [("gemma", '<|"|>'), ("functiongemma", "<escape>")])
def test_arguments_in_braces_are_parsed_and_streamed(name: str, mark: str) -> None:
    call_format = next(piece for piece in all_formats() if piece.name == name)
    text = f"{call_format.openings[0]}call:save{BRACE_TEXT}{call_format.closings[0]}".replace(
        "«", mark
    ).replace("»", mark)
    for seed in range(20):
        assert parse_calls(split_randomly(call_format, text, seed)) == [BRACE_VALUES]
    splitter, text_part = (
        OutputSplitter(None, call_format, TOOLS.names, TOOLS.string_arguments),
        "one word and the next, " * 9,
    )
    streamed = "".join(
        piece.text
        for piece in splitter.feed(f"{call_format.openings[0]}call:save{{text:{mark}{text_part}")
        if piece.text
    )
    assert streamed == f'{{"text": "{text_part}'
    bare = f"{call_format.openings[0]}call:save{{text:12,any:12}}{call_format.closings[0]}"
    assert parse_calls(split_randomly(call_format, bare, 1)) == [{"text": "12", "any": 12}]


@pytest.mark.parametrize(
    ("inner", "streamed", "content"),
    [
        ("{a:{", '{"a": {', ""),
        ("{a:" * 5000, '{"a": ' * 5000, ""),
        ("{a:1 {b", '{"a": 1', "{b"),
        ("{a:1]", '{"a": 1', ""),
        ("{,a:1}", "{", "a:1}"),
    ],
)
def test_invalid_braces_end_the_call(inner: str, streamed: str, content: str) -> None:
    call_format = next(piece for piece in all_formats() if piece.name == "gemma")
    for seed in range(3):
        pieces = split_randomly(call_format, f"<|tool_call>call:save{inner}<tool_call|>", seed)
        assert [
            piece.call.arguments for piece in pieces if piece.kind == "call_end" and piece.call
        ] == [streamed]
        assert "".join(piece.text for piece in pieces if piece.kind == "content").strip() == content


def test_a_key_ends_with_its_call() -> None:
    text = "<tool_call>save<arg_key>any</tool_call> So <arg_key>any</arg_key><arg_value>1"
    for seed in range(6):
        pieces = split_randomly(TAG_FORMATS["glm"], text, seed)
        assert [
            piece.call.arguments for piece in pieces if piece.kind == "call_end" and piece.call
        ] == ["{}"]


PYTHON: dict[str, Any] = {
    "'a'": "a",
    '"it\'s (a, b) = [c]"': "it's (a, b) = [c]",
    "''": "",
    '""': "",
    "'é 日 \U0001f600'": "é 日 \U0001f600",
    r"'a\n\t\'\\ \x41\u00e9\U0001F600\N{BULLET}\101\0 \d \x4g \N{no}'": "a\n\t'\\ Aé\U0001f600•A\0 \\d \\x4g \\N{no}",
    r"'\ud83d\ude00'": "\U0001f600",
    r"r'a\n\'b'": r"a\n\'b",
    "u'x'": "x",
    "'a' \"b\"\n  r'c\\d'": r"abc\d",
    "'a\nb'": "a\nb",
    "'a\\\nb'": "ab",
    "'''it's \"so\"\n'''": 'it\'s "so"\n',
    '"""a""b"""': 'a""b',
    "'<|x'": "<|x",
    "-2.5": -2.5,
    "1_000": 1000,
    "0x1F": 31,
    "True": True,
    "false": False,
    "None": None,
    "( 'a'\n 'b' )": "ab",
    "(1,)": [1],
    "()": [],
    "{}": {},
    "[1, ('x,)', \"y]\"), {'k': [], 3: None}, \"\"\"}'\"\"\", '\\'<|']": [
        1,
        ["x,)", "y]"],
        {"k": [], "3": None},
        "}'",
        "'<|",
    ],
    # not literals, or literals that JSON does not have: they become strings and are not run
    "Paris": "Paris",
    "open('x')": "open('x')",
    "{[1]}": "{[1]}",
    "1e999": "1e999",
    "007": "007",
    "b'x'": "b'x'",
    "f(1, 2)": "f(1, 2)",
    "1 + 1": "1 + 1",
    "2026-11-22": "2026-11-22",
    "": "",
    "{1, 2}": "{1, 2}",
    "]": "]",
}
LFM = next(piece for piece in all_formats() if piece.name == "lfm")
START, STOP = LFM.openings[0], LFM.closings[0]


@pytest.mark.parametrize("value", PYTHON)
def test_python_values_are_parsed_for_any_split(value: str) -> None:
    text = f"{START}[save(any={value}, text = {value} ,from=1), get-it(any={value},)]{STOP}"
    for seed in range(8):
        found = parse_calls(split_randomly(LFM, text, seed))
        stripped = value if type(PYTHON[value]) in (int, float) else PYTHON[value]
        assert found == [
            {"any": PYTHON[value], "text": stripped, "from": 1},
            {"any": PYTHON[value]},
        ], (seed, text)


def test_python_strings_are_streamed() -> None:
    splitter, text_part = (
        OutputSplitter(None, LFM, TOOLS.names, TOOLS.string_arguments),
        "one word and the next, " * 9,
    )
    streamed = "".join(
        piece.text
        for piece in splitter.feed(f"{START}[save(count=3, text='{text_part}")
        if piece.kind == "arguments"
    )
    assert streamed == f'{{"count": 3, "text": "{text_part}'
    streamed += "".join(
        piece.text for piece in [*splitter.feed(f"END')]{STOP}"), *splitter.finish()]
    )
    assert json.loads(streamed) == {"count": 3, "text": f"{text_part}END"}


@pytest.mark.parametrize(
    ("inner", "streamed", "content"),
    [
        ("save(any='a' + 'b')", '{"any": "a"', "+ 'b')"),
        ("save(any=1, 'x')", '{"any": 1', "'x')"),
        ("save(any=1), save('x')]", '{"any": 1}', "save('x')]"),
        ("save(any='x'), and more]", '{"any": "x"}', "and more]"),
        ("save(any=[1", '{"any": ', ""),
        ("save(any=7", '{"any": ', ""),
    ],
)
def test_invalid_keyword_arguments_end_the_call(inner: str, streamed: str, content: str) -> None:
    for seed in range(6):
        pieces = split_randomly(LFM, f"{START}[{inner}{STOP}", seed)
        assert [
            piece.call.arguments for piece in pieces if piece.kind == "call_end" and piece.call
        ] == [streamed]
        assert "".join(piece.text for piece in pieces if piece.kind == "content").strip() == content


@pytest.mark.parametrize(
    ("inner", "streamed"),
    [
        ("save(any=[1, 'x", '{"any": '),
        ("save(any=1, te", '{"any": 1'),
        ("save(any='a\\", '{"any": "a'),
        ("save(", "{"),
        ("save(any=" + "[" * 5000, '{"any": '),
        ("save(any='a'", '{"any": "a"'),
    ],
)
def test_cut_off_keyword_arguments_are_partial(inner: str, streamed: str) -> None:
    for seed in range(6):
        pieces = split_randomly(LFM, f"{START}[{inner}", seed)
        content = "".join(piece.text for piece in pieces if piece.kind == "content")
        assert [
            piece.call.arguments for piece in pieces if piece.kind == "call_end" and piece.call
        ] == [streamed] * (inner != "save(")
        assert content == (f"{START}[save(" if inner == "save(" else "")
