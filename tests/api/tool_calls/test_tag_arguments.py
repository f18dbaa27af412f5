"""Arguments as tags, in braces or as Python calls: streamed while they arrive, with any content."""

import json
import random
from typing import Any

import pytest

from llmcli.api.fields import Fields
from llmcli.api.forms.output_splitter import OutputSplitter
from llmcli.api.forms.tool_call_stream import OutputPiece
from llmcli.api.forms.tools import read_tools
from llmcli.api.tool_calls import all_formats
from llmcli.api.tool_calls.base import ToolCallFormat, parse_arguments
from llmcli.api.tool_calls.tag_arguments import TagArguments

STRINGS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "any": {}, "count": {"type": "integer"}},
}
OFFERED = read_tools(
    Fields({"tools": [{"type": "function", "function": {"name": "save", "parameters": STRINGS}}]})
)
KIN = {one.name: one for one in all_formats() if isinstance(one.argument_format, TagArguments)}
MARK = "｜DSML｜"


def written(kin: ToolCallFormat, values: dict[str, str]) -> str:
    """A call as the family's template writes one."""
    name = kin.name
    if name in ("coder", "seed"):
        inner = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
        )
        return f"{kin.openings[0]}\n<function=save>\n{inner}</function>\n{kin.closings[0]}"
    if name == "glm":
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in values.items()
        )
        return "<tool_call>save\n" + "".join(pairs) + "</tool_call>"
    at = MARK if name == "dsml" else ""
    inner = "".join(
        f'<{at}parameter name="{key}">{value}</{at}parameter>\n' for key, value in values.items()
    )
    return f'{kin.openings[0]}\n<{at}invoke name="save">\n{inner}</{at}invoke>\n{kin.closings[0]}'


def listened(kin: ToolCallFormat, text: str, seed: int) -> list[OutputPiece]:
    listener, chance, out = (
        OutputSplitter(None, kin, OFFERED.names, OFFERED.string_arguments),
        random.Random(seed),
        list[OutputPiece](),
    )
    while text:
        cut = chance.choice((1, 2, 5, 30, len(text)))
        out += listener.feed(text[:cut])
        text = text[cut:]
    return out + listener.finish()


def arguments(heard: list[OutputPiece]) -> list[dict[str, Any] | None]:
    assert "".join(one.text for one in heard if one.kind == "content") == ""
    calls = [one.call for one in heard if one.kind == "call_end" and one.call]
    assert "".join(one.text for one in heard if one.kind == "arguments") == "".join(
        one.arguments for one in calls
    )
    return [parse_arguments(one) for one in calls]


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


@pytest.mark.parametrize("kin", KIN.values(), ids=KIN.keys())
@pytest.mark.parametrize("value", VALUES)
def test_every_value_is_read_however_it_is_cut(kin: ToolCallFormat, value: str) -> None:
    text = written(kin, {"any": value, "text": value, "count": "7"})
    stripped = value.strip() if kin.name == "glm" else value
    for seed in range(6):
        found = arguments(listened(kin, text, seed))
        assert found == [{"any": VALUES[value], "text": stripped, "count": 7}], (seed, text)


@pytest.mark.parametrize("kin", KIN.values(), ids=KIN.keys())
def test_text_is_told_while_it_comes(kin: ToolCallFormat) -> None:
    for key, words in (("text", "5 is a number, "), ("any", "one word and the next, ")):
        before, after = written(kin, {key: words * 9 + "END"}).split("END")
        listener = OutputSplitter(None, kin, OFFERED.names, OFFERED.string_arguments)
        told = "".join(one.text for one in listener.feed(before) if one.kind == "arguments")
        assert told == f'{{"{key}": "{words * 9}'.rstrip() + " " * (kin.name != "glm")
        rest = [*listener.feed("END" + after), *listener.finish()]
        assert json.loads(told + "".join(one.text for one in rest)) == {key: words * 9 + "END"}
    (called,) = (one for one in listened(kin, before, 1) if one.kind == "call_end")
    assert (
        called.call and called.call.arguments == told
    )  # what was cut off is told as far as it came


@pytest.mark.parametrize("kin", KIN.values(), ids=KIN.keys())
def test_a_call_without_arguments_and_one_behind_another(kin: ToolCallFormat) -> None:
    for text in (written(kin, {}), written(kin, {}).replace("\n", "")):
        assert arguments(listened(kin, f"{text}\n{text}", 3)) == [{}, {}]
    if kin.argument_format and kin.argument_format.next_call_pattern:
        one, other = (written(kin, {"any": number}) for number in "12")
        both = one.replace(kin.closings[0], "") + other.replace(kin.openings[0], "")
        assert arguments(listened(kin, both, 4)) == [{"any": 1}, {"any": 2}]


def test_tags_that_were_left_out_end_a_value_where_that_is_plain() -> None:
    kin = KIN["coder"]
    text = "<tool_call><function=save><parameter=any>a<parameter=text>b\n</function> </tool_call>"
    for seed in range(6):
        assert arguments(listened(kin, text, seed)) == [{"any": "a", "text": "b"}]


BRACES = (
    '{text:«a {b}: [c], "d"\\n», any:{x:[1,«», {}, true],«y z»:null} ,count: -2.5, more:word or two,zip:007,'
    "flat:[]}"
)
TOLD = {
    "text": 'a {b}: [c], "d"\\n',
    "any": {"x": [1, "", {}, True], "y z": None},
    "count": -2.5,
    "more": "word or two",
    "zip": "007",
    "flat": [],
}


@pytest.mark.parametrize(("name", "mark"), [("gemma", '<|"|>'), ("functiongemma", "<escape>")])
def test_braces_are_told_while_they_come(name: str, mark: str) -> None:
    kin = next(one for one in all_formats() if one.name == name)
    text = f"{kin.openings[0]}call:save{BRACES}{kin.closings[0]}".replace("«", mark).replace(
        "»", mark
    )
    for seed in range(20):
        assert arguments(listened(kin, text, seed)) == [TOLD]
    listener, words = (
        OutputSplitter(None, kin, OFFERED.names, OFFERED.string_arguments),
        "one word and the next, " * 9,
    )
    told = "".join(
        one.text
        for one in listener.feed(f"{kin.openings[0]}call:save{{text:{mark}{words}")
        if one.text
    )
    assert told == f'{{"text": "{words}'
    bare = f"{kin.openings[0]}call:save{{text:12,any:12}}{kin.closings[0]}"
    assert arguments(listened(kin, bare, 1)) == [{"text": "12", "any": 12}]


@pytest.mark.parametrize(
    ("inner", "told", "said"),
    [
        ("{a:{", '{"a": {', ""),
        ("{a:" * 5000, '{"a": ' * 5000, ""),
        ("{a:1 {b", '{"a": 1', "{b"),
        ("{a:1]", '{"a": 1', ""),
        ("{,a:1}", "{", "a:1}"),
    ],
)
def test_braces_that_are_none_end_the_call_where_they_are(inner: str, told: str, said: str) -> None:
    kin = next(one for one in all_formats() if one.name == "gemma")
    for seed in range(3):
        heard = listened(kin, f"<|tool_call>call:save{inner}<tool_call|>", seed)
        assert [one.call.arguments for one in heard if one.kind == "call_end" and one.call] == [
            told
        ]
        assert "".join(one.text for one in heard if one.kind == "content").strip() == said


def test_a_key_goes_no_further_than_its_call() -> None:
    text = "<tool_call>save<arg_key>any</tool_call> So <arg_key>any</arg_key><arg_value>1"
    for seed in range(6):
        heard = listened(KIN["glm"], text, seed)
        assert [one.call.arguments for one in heard if one.kind == "call_end" and one.call] == [
            "{}"
        ]


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
    # None of these is a value of Python's that JSON has, and nothing of them is run.
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
LFM = next(one for one in all_formats() if one.name == "lfm")
START, STOP = LFM.openings[0], LFM.closings[0]


@pytest.mark.parametrize("value", PYTHON)
def test_every_value_of_pythons_is_read_however_it_is_cut(value: str) -> None:
    text = f"{START}[save(any={value}, text = {value} ,from=1), get-it(any={value},)]{STOP}"
    for seed in range(8):
        found = arguments(listened(LFM, text, seed))
        stripped = value if type(PYTHON[value]) in (int, float) else PYTHON[value]
        assert found == [
            {"any": PYTHON[value], "text": stripped, "from": 1},
            {"any": PYTHON[value]},
        ], (seed, text)


def test_pythons_texts_are_told_while_they_come() -> None:
    listener, words = (
        OutputSplitter(None, LFM, OFFERED.names, OFFERED.string_arguments),
        "one word and the next, " * 9,
    )
    told = "".join(
        one.text
        for one in listener.feed(f"{START}[save(count=3, text='{words}")
        if one.kind == "arguments"
    )
    assert told == f'{{"count": 3, "text": "{words}'
    told += "".join(one.text for one in [*listener.feed(f"END')]{STOP}"), *listener.finish()])
    assert json.loads(told) == {"count": 3, "text": f"{words}END"}


@pytest.mark.parametrize(
    ("inner", "told", "said"),
    [
        ("save(any='a' + 'b')", '{"any": "a"', "+ 'b')"),
        ("save(any=1, 'x')", '{"any": 1', "'x')"),
        ("save(any=1), save('x')]", '{"any": 1}', "save('x')]"),
        ("save(any='x'), and more]", '{"any": "x"}', "and more]"),
        ("save(any=[1", '{"any": ', ""),
        ("save(any=7", '{"any": ', ""),
    ],
)
def test_keywords_that_are_none_end_the_call_where_they_are(
    inner: str, told: str, said: str
) -> None:
    for seed in range(6):
        heard = listened(LFM, f"{START}[{inner}{STOP}", seed)
        assert [one.call.arguments for one in heard if one.kind == "call_end" and one.call] == [
            told
        ]
        assert "".join(one.text for one in heard if one.kind == "content").strip() == said


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        ("save(any=[1, 'x", '{"any": '),
        ("save(any=1, te", '{"any": 1'),
        ("save(any='a\\", '{"any": "a'),
        ("save(", "{"),
        ("save(any=" + "[" * 5000, '{"any": '),
        ("save(any='a'", '{"any": "a"'),
    ],
)
def test_keywords_that_were_cut_off_are_told_as_far_as_they_came(inner: str, told: str) -> None:
    for seed in range(6):
        heard = listened(LFM, f"{START}[{inner}", seed)
        said = "".join(one.text for one in heard if one.kind == "content")
        assert [one.call.arguments for one in heard if one.kind == "call_end" and one.call] == [
            told
        ] * (inner != "save(")
        assert said == (f"{START}[save(" if inner == "save(" else "")
