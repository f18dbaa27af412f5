"""Tool-call formats: each is parsed as its models write it, in any pieces, also when it is forced."""

import json
import random
from dataclasses import replace

import jiter
import jsonschema
import pytest

from llmcli.api.fields import Fields
from llmcli.api.forms.output_splitter import OutputSplitter
from llmcli.api.forms.tool_call_stream import parse_partial_arguments
from llmcli.api.forms.tools import read_tools
from llmcli.api.tool_calls import all_formats, call_marks, find_format
from llmcli.api.tool_calls.base import (
    ParsedCalls,
    ToolCallFormat,
    parse_arguments,
    read_calls,
    text_between,
)
from llmcli.api.tool_calls.hermes import HermesCalls
from llmcli.runtime.constraint import tool_calls as constraint
from llmcli.runtime.constraint.base import Constraint, Matcher
from llmcli.runtime.constraint.compile import GrammarCompiler
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.text.reasoning import ThinkingTags
from tests.fixtures.fakes import FakeModel

ARGUMENTS = {"city": 'Paris "x"', "days": 3}
JSON = json.dumps(ARGUMENTS)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CODER = '<function=weather>\n<parameter=city>\nParis "x"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>'
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Paris "x"</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>'
)
WRITTEN = {
    "hermes": ['<tool_call>\n{"name": "weather", "arguments": ' + JSON + "}\n</tool_call>"],
    "coder": [f"<tool_call>\n{CODER}\n</tool_call>"],
    "glm": [
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris "x"</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ],
    "llama": [
        '{"name": "weather", "parameters": ' + JSON + "}",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": ' + JSON + "}",
    ],
    "mistral": ['[TOOL_CALLS][{"name": "weather", "arguments": ' + JSON + ', "id": "123456789"}]'],
    "mistral-named": [
        "[TOOL_CALLS]weather[ARGS]" + JSON,
        "[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]" + JSON,
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + JSON
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + JSON
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "granite": ['<|tool_call|>[{"name": "weather", "arguments": ' + JSON + "}]"],
    "command": [
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        + JSON
        + "}\n]<|END_ACTION|>"
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        + JSON
        + "<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "gemma": ['<|tool_call>call:weather{city:<|"|>Paris "x"<|"|>,days:3}<tool_call|>'],
    "functiongemma": [
        '<start_function_call>call:weather{city:<escape>Paris "x"<escape>,days:3}<end_function_call>'
    ],
    "lfm": [
        "<|tool_call_start|>[weather(city='Paris \"x\"', days=3)]<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "weather", "arguments": ' + JSON + "}]<|tool_call_end|>",
    ],
    "minimax": [f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>"],
    "dsml": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
        'Paris "x"</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
        'Paris "x"</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ],
    "seed": [f"<seed:tool_call>\n{CODER}\n</seed:tool_call>"],
    "apertus": ['<|tools_prefix|>[{"weather": ' + JSON + "}]<|tools_suffix|>"],
    "harmony": ["<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + JSON],
}
CASES = [(one, text) for one in all_formats() for text in WRITTEN[one.name]]
NAMES = frozenset({"weather"})
OTHER = {"type": "function", "function": {"name": "other"}}


def heard(listener: OutputSplitter, text: str, seed: int = 0) -> dict[str, str]:
    """Everything of each kind, the text coming in pieces of any size."""
    chance, out = random.Random(seed), {"thinking": "", "content": "", "calls": []}
    while text:
        cut = chance.choice((1, 2, 3, 7, 40))
        piece, text = text[:cut], text[cut:]
        for one in listener.feed(piece):
            _add(out, one)
    for one in listener.finish():
        _add(out, one)
    return out


def _add(out: dict, one) -> None:
    if one.kind == "call_start":
        assert one.call.id
        assert not one.call.arguments
        out["open"] = (one.call, "")
    elif one.kind == "arguments":
        assert one.text
        out["open"] = (out["open"][0], out["open"][1] + one.text)
    elif one.kind == "call_end":
        begun, text = out.pop("open")
        assert one.call == replace(begun, arguments=text)
        whole = parse_arguments(one.call)
        out["calls"].append((one.call.name, text if whole is None else whole))
    else:
        assert one.text
        out[one.kind] += one.text


@pytest.mark.parametrize(
    ("kin", "text"), CASES, ids=[f"{kin.name}{text.count('o')}" for kin, text in CASES]
)
def test_a_call_is_read_as_its_family_writes_it(kin: ToolCallFormat, text: str) -> None:
    for seed in range(8):
        found = heard(OutputSplitter(None, kin, NAMES), text, seed)
        assert found == {"thinking": "", "content": "", "calls": [("weather", ARGUMENTS)]}
        found = heard(
            OutputSplitter(None, kin, NAMES), f"<think>\nLet me look.\n</think>\n\n{text}", seed
        )
        assert found == {
            "thinking": "Let me look.\n",
            "content": "",
            "calls": [("weather", ARGUMENTS)],
        }


@pytest.mark.parametrize("kin", all_formats(), ids=lambda one: one.name)
def test_what_is_cut_or_damaged_is_said_and_never_lost(kin: ToolCallFormat) -> None:
    whole = WRITTEN[kin.name][0]
    for end in range(1, len(whole)):
        found = heard(OutputSplitter(None, kin, NAMES), whole[:end], end)
        cut = [text for _, text in found["calls"] if isinstance(text, str)]
        assert (
            found["content"] == whole[:end] or found["calls"] == [("weather", ARGUMENTS)] or cut
        ), end
        assert not cut or (JSON.startswith(cut[0]) and not found["content"]), end
        assert not cut or JSON not in whole or whole[:end].endswith(cut[0]), end
    found = heard(
        OutputSplitter(None, kin, NAMES), "I say { and < and [ and <tool but call nothing. "
    )
    assert found == {
        "thinking": "",
        "content": "I say { and < and [ and <tool but call nothing. ",
        "calls": [],
    }


@pytest.mark.parametrize("kin", all_formats(), ids=lambda one: one.name)
def test_what_is_forced_follows_the_schema_and_is_read_back(kin: ToolCallFormat) -> None:
    offered = read_tools(Fields({"tools": [WEATHER], "tool_choice": "required"}))
    grammar = GrammarCompiler(FakeModel(), lambda one: pytest.fail("not llama.cpp's"))(
        offered.constraint(kin)
    )
    before, after = kin.forced_frame("weather")
    begin, between, end = kin.wrappers
    one = before + json.dumps(ARGUMENTS) + after
    texts = [begin + one + end] + ([] if between is None else [begin + one + between + one + end])
    for count, text in enumerate(texts, 1):
        matcher = grammar.start()
        for token in text.encode():
            assert matcher.allows(token), (text, chr(token))
            matcher.accept(token)
        assert matcher.is_accepting
        assert (
            heard(OutputSplitter(None, kin, NAMES), text)["calls"]
            == [("weather", ARGUMENTS)] * count
        )
    matcher = grammar.start()
    wrong = (begin + before + '{"town').encode()
    assert not all(matcher.allows(token) and (matcher.accept(token) or True) for token in wrong)


def matcher(wanted: Constraint) -> Matcher:
    """At the beginning of a grammar over bytes."""
    return GrammarCompiler(FakeModel(), lambda one: pytest.fail("not llama.cpp's"))(wanted).start()


def follows(place: Matcher, text: str) -> bool:
    """Go on by a text as far as the grammar lets it."""
    for token in text.encode():
        if not place.allows(token):
            return False
        place.accept(token)
    return True


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


@pytest.mark.parametrize("kin", all_formats(), ids=lambda one: one.name)
def test_a_call_that_may_be_made_is_bound_from_its_mark_on(kin: ToolCallFormat) -> None:
    offered = read_tools(Fields({"tools": [STRICT]}))
    wanted, lead = (
        offered.interleaved_constraint(kin),
        "" if kin.starts_answer else 'I look {"it": "up"} <now. ',
    )
    begin, _, end = kin.wrappers
    free = matcher(wanted)
    assert follows(free, 'Nothing { "binds" < this [1] text.\n\nä 日 ')
    assert free.is_accepting
    for mark, (before, after) in kin.optional_frames("weather").items():
        opening = begin + before
        assert opening.startswith(mark)
        place = matcher(wanted)
        assert follows(place, lead + opening + JSON + after + end), (mark, opening)
        assert place.is_accepting
        if not kin.ends_answer:
            assert follows(place, " And that is all.")
            assert place.is_accepting
        text = lead + opening + JSON + after + end
        assert heard(OutputSplitter(None, kin, NAMES), text)["calls"] == [("weather", ARGUMENTS)]
        assert follows(matcher(wanted), lead + mark[:-1] + "no mark")
        assert not follows(matcher(wanted), lead + opening.replace("weather", "wether"))
        assert not follows(matcher(wanted), lead + opening + '{"town')
        assert not matcher_ends(wanted, lead + mark)


def matcher_ends(wanted: Constraint, text: str) -> bool:
    """Whether an answer may end behind this text."""
    place = matcher(wanted)
    assert follows(place, text)
    return place.is_accepting


def test_several_calls_amid_text_and_only_one_where_that_is_asked() -> None:
    call = WRITTEN["hermes"][0]
    several, alone = (
        read_tools(
            Fields({"tools": [STRICT, OTHER], "parallel_tool_calls": parallel})
        ).interleaved_constraint(find_format(""))
        for parallel in (True, False)
    )
    assert matcher_ends(several, f"One {call}\nand {call}{call} done")
    assert matcher_ends(alone, f"One {call} done")
    assert not follows(matcher(alone), f"One {call} and {call}")
    loose = call.replace("weather", "other").replace(JSON, '{"any": [1, {}]}')
    assert matcher_ends(several, loose)
    assert not follows(matcher(several), loose.replace('{"any', '["any'))


class The(HermesCalls):
    """A family whose mark every story has."""

    name = "the"
    openings = (" the",)
    closings = (" end",)

    def parse(self, text: str, over: bool) -> ParsedCalls | None:
        inner = text_between(text, " the", " end", over)
        return inner and ParsedCalls(read_calls(json.loads(inner[0])), inner[1])


def test_whatever_a_model_says_behind_the_mark_is_a_valid_call(stories_runner: Runner) -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"enum": ["Monday", "Sunday"]}, "far": {"type": "boolean"}},
        "required": ["day", "far"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "walk", "parameters": schema, "strict": True}}
    offered, kin, made = (
        read_tools(Fields({"tools": [tool], "parallel_tool_calls": False})),
        The(),
        0,
    )
    grammar = stories_runner.grammars(offered.interleaved_constraint(kin))
    for seed in range(3):
        sampling = default_sampling().with_values({"seed": seed})
        request = Request(
            stories_runner.encode_prompt("Once upon a time"),
            sampling,
            160,
            grammar=grammar,
            strategy=stories_runner.default_strategy(grammar),
        )
        reply = stories_runner.reply(request)
        for _ in reply:
            pass
        found = heard(OutputSplitter(None, kin), reply.answer.text)
        assert " the" not in found["content"], reply.answer.text
        for name, arguments in found["calls"]:
            assert name == "walk"
            jsonschema.validate(arguments, schema)
        made += len(found["calls"])
    assert made


def test_a_document_may_stand_instead_of_a_call() -> None:
    offered = read_tools(Fields({"tools": [WEATHER]}))
    wanted = offered.constraint(
        find_format(""), {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    )
    matcher = GrammarCompiler(FakeModel(), lambda one: pytest.fail("not llama.cpp's"))(
        wanted
    ).start()
    for token in b'{"a": 1}':
        assert matcher.allows(token)
        matcher.accept(token)
    assert matcher.is_accepting


@pytest.mark.parametrize("kin", all_formats(), ids=lambda one: one.name)
def test_arguments_come_in_pieces_that_joined_are_the_whole(kin: ToolCallFormat) -> None:
    begin, between, end = kin.wrappers
    before, after = kin.forced_frame("weather")
    calls = [
        before + text + after
        for text in (JSON, json.dumps({"city": 'x\\"}]', "more": [{"a": {}}, "é"]}))
    ]
    text = begin + (between or "").join(calls if between is not None else calls[:1]) + end
    text = (
        ("" if kin.starts_answer else "I look.\n") + text + ("" if kin.ends_answer else "\nDone.")
    )
    one, whole = OutputSplitter(None, kin, NAMES), OutputSplitter(None, kin, NAMES)
    pieces = [piece for letter in text for piece in one.feed(letter)] + one.finish()
    at_once = whole.feed(text) + whole.finish()
    assert "".join(p.text for p in pieces if p.kind == "content") == "".join(
        p.text for p in at_once if p.kind == "content"
    )
    assert [p.call.arguments for p in pieces if p.kind == "call_end"] == [
        p.call.arguments for p in at_once if p.kind == "call_end"
    ]
    assert len([p for p in pieces if p.kind == "arguments"]) >= len(JSON) - 1
    assert next(p.call.arguments for p in pieces if p.kind == "call_end") == JSON
    assert [p.kind for p in at_once if p.kind == "call_end"] == ["call_end"] * (
        1 if between is None else 2
    )


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} I am done', " I am done", ['{"a": 1}']),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "",
            ['{"a": 1}', "{}"],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Well.', "Well.", ['{"a": 1']),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
            "",
            ['{"a": "x\\ny"}'],
        ),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ['{"a": 1}']),
    ],
)
def test_what_was_told_of_a_call_stays_and_what_is_none_of_it_is_said(
    text: str, said: str, calls: list[str]
) -> None:
    for step in (1, 5, len(text)):
        listener = OutputSplitter(None, find_format(""), frozenset())
        parts = [text[at : at + step] for at in range(0, len(text), step)]
        out = [one for part in parts for one in listener.feed(part)] + listener.finish()
        assert [one.call.arguments for one in out if one.kind == "call_end" and one.call] == calls
        assert "".join(one.text for one in out if one.kind == "content").strip() == said.strip()


def test_as_much_of_a_call_that_was_cut_off_is_read_as_came() -> None:
    text = '{"a": 1.5, "b": [1, {"c": "d, \\"e"}, true], "f": {"g": null, "h": []}, "i": "j"}'
    for end in range(len(text) + 1):
        assert parse_partial_arguments(text[:end]) == (
            jiter.from_json(text[:end].encode(), partial_mode=True) if end else {}
        ), end
    assert parse_partial_arguments("{'a': 1}") == {} == parse_partial_arguments("[1]")
    assert parse_partial_arguments('{"a": 1, "b": NaN}') == {
        "a": 1
    }  # told back it would be no JSON


def test_text_thinking_and_several_calls_are_told_apart() -> None:
    call = WRITTEN["hermes"][0]
    text = f"<think>\nLet me look.\n</think>\n\nI look it up.\n\n{call}\n{call}\n"
    for seed in range(20):
        found = heard(OutputSplitter(None, find_format(""), NAMES), text, seed)
        assert found["thinking"] == "Let me look.\n"
        assert found["content"] == "I look it up."
        assert found["calls"] == [("weather", ARGUMENTS)] * 2
        opened = heard(
            OutputSplitter(ThinkingTags("<think>", "</think>"), None), "hm\n</think>\n\nyes", seed
        )
        assert opened == {"thinking": "hm\n", "content": "yes", "calls": []}
        others = heard(
            OutputSplitter(ThinkingTags("<think>", "</think>"), None),
            "see [/THINK]</think>yes",
            seed,
        )  # none of its tags
        assert others == {"thinking": "see [/THINK]", "content": "yes", "calls": []}


def test_json_that_names_no_function_is_text_for_a_family_without_tags() -> None:
    kin = find_format("<|python_tag|>")
    for text in (
        '{"name": "other", "parameters": {}}',
        '{"name": 5}',
        "{\n  1",
        'Text. {"name": "weather"}',
    ):
        assert heard(OutputSplitter(None, kin, NAMES), text)["content"] == text


@pytest.mark.parametrize("kin", all_formats(), ids=lambda one: one.name)
def test_a_model_that_opens_call_after_call_is_not_read_again_for_each(kin: ToolCallFormat) -> None:
    n_parses = 0

    class Counting(type(kin)):
        def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
            nonlocal n_parses
            n_parses += 1
            return super().parse(text, is_last)

    splitter, text = OutputSplitter(None, Counting(), NAMES), kin.openings[0] * 500
    assert "".join(piece.text for piece in [*splitter.feed(text), *splitter.finish()]) == text
    assert 0 < n_parses < 100


def test_every_mark_is_known_once() -> None:
    assert {"<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"} <= set(call_marks())
    assert all_formats()[-1].name == "hermes"  # which fits everything


def test_calls_are_separated_by_a_constraint_only_where_there_may_be_several() -> None:
    alone = read_tools(
        Fields({"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False})
    )
    assert (
        constraint.read_tool_calls(alone.constraint(find_format("")).text).syntaxes[0].between
        is None
    )


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        (
            "gemma",
            '<|tool_call>call:f{a:{b:[1,<|"|>x, {y}<|"|>,true],c:null},d:-2.5,<|"|>e<|"|>:<|"|><|"|>}<tool_call|>',
            {"a": {"b": [1, "x, {y}", True], "c": None}, "d": -2.5, "e": ""},
        ),
        ("gemma", "<|tool_call>call:f{}<tool_call|>", {}),
        (
            "lfm",
            "<|tool_call_start|>[f(a={'b': [1, 'x']}, c=true, d=None, e=-2.5)]<|tool_call_end|>",
            {"a": {"b": [1, "x"]}, "c": True, "d": None, "e": -2.5},
        ),
        ("lfm", "<|tool_call_start|>f()<|tool_call_end|>", {}),
        (
            "dsml",
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">3'
            "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
            {"a": "3"},
        ),
        (
            "coder",
            "<tool_call><function=f><parameter=a>NaN</parameter></function></tool_call>",
            {"a": "NaN"},
        ),
        (
            "gemma",
            "<|tool_call>call:f{a:-Infinity,b:1e999}<tool_call|>",
            {"a": "-Infinity", "b": "1e999"},
        ),
    ],
)
def test_values_of_every_kind_are_read(name: str, text: str, given: dict) -> None:
    kin = next(one for one in all_formats() if one.name == name)
    assert heard(OutputSplitter(None, kin, NAMES), text) == {
        "thinking": "",
        "content": "",
        "calls": [("f", given)],
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm", "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[f('x')]<|tool_call_end|>"),
        ("lfm", "<|tool_call_start|>[f(**x)]"),
        ("lfm", "<|tool_call_start|>[f(x for x in y)]"),
        ("lfm", "<|tool_call_start|>" + "(" * 5000),
        ("gemma", "<|tool_call>call f{a:1}<tool_call|>"),
        ("gemma", "<|tool_call>call:f{"),
        ("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("minimax", "<minimax:tool_call>x</minimax:tool_call>"),
    ],
)
def test_what_is_no_call_is_said_and_nothing_of_it_is_run(name: str, text: str) -> None:
    kin = next(one for one in all_formats() if one.name == name)
    assert heard(OutputSplitter(None, kin, NAMES), text)["content"] == text
