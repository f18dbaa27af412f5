"""Tool call formats: calls are parsed as their models write them, for any split of the text, and
forced calls are parsed, too.
"""

import json
import random
from dataclasses import replace

import jiter
import jsonschema
import pytest

from llmcli.api.conversation.output_splitter import OutputSplitter
from llmcli.api.conversation.tool_call_stream import parse_partial_arguments
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
from llmcli.runtime.constraint.tool_calls import AnswerSchema
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.text.reasoning import ThinkingTags
from tests.fixtures.fakes import FakeModel
from tests.fixtures.tools import chat_tools

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
CASES = [(call_format, text) for call_format in all_formats() for text in WRITTEN[call_format.name]]
NAMES = frozenset({"weather"})
OTHER = {"type": "function", "function": {"name": "other"}}


def collect_output(splitter: OutputSplitter, text: str, seed: int = 0) -> dict[str, str]:
    """Return the thinking, the content and the calls of a text that arrives in pieces of random
    sizes.
    """
    rng, out = random.Random(seed), {"thinking": "", "content": "", "calls": []}
    while text:
        cut = rng.choice((1, 2, 3, 7, 40))
        chunk, text = text[:cut], text[cut:]
        for piece in splitter.feed(chunk):
            _add(out, piece)
    for piece in splitter.finish():
        _add(out, piece)
    return out


def _add(out: dict, piece) -> None:
    if piece.kind == "call_start":
        assert piece.call.id
        assert not piece.call.arguments
        out["open"] = (piece.call, "")
    elif piece.kind == "arguments":
        assert piece.text
        out["open"] = (out["open"][0], out["open"][1] + piece.text)
    elif piece.kind == "call_end":
        call, text = out.pop("open")
        assert piece.call == replace(call, arguments=text)
        complete = parse_arguments(piece.call)
        out["calls"].append((piece.call.name, text if complete is None else complete))
    else:
        assert piece.text
        out[piece.kind] += piece.text


@pytest.mark.parametrize(
    ("call_format", "text"),
    CASES,
    ids=[f"{call_format.name}{text.count('o')}" for call_format, text in CASES],
)
def test_calls_are_parsed_in_each_format(call_format: ToolCallFormat, text: str) -> None:
    for seed in range(8):
        found = collect_output(OutputSplitter(None, call_format, NAMES), text, seed)
        assert found == {"thinking": "", "content": "", "calls": [("weather", ARGUMENTS)]}
        found = collect_output(
            OutputSplitter(None, call_format, NAMES),
            f"<think>\nLet me look.\n</think>\n\n{text}",
            seed,
        )
        assert found == {
            "thinking": "Let me look.\n",
            "content": "",
            "calls": [("weather", ARGUMENTS)],
        }


@pytest.mark.parametrize("call_format", all_formats(), ids=lambda call_format: call_format.name)
def test_a_cut_off_call_becomes_content_or_a_partial_call(call_format: ToolCallFormat) -> None:
    complete = WRITTEN[call_format.name][0]
    for end in range(1, len(complete)):
        found = collect_output(OutputSplitter(None, call_format, NAMES), complete[:end], end)
        cut = [text for _, text in found["calls"] if isinstance(text, str)]
        assert (
            found["content"] == complete[:end] or found["calls"] == [("weather", ARGUMENTS)] or cut
        ), end
        assert not cut or (JSON.startswith(cut[0]) and not found["content"]), end
        assert not cut or JSON not in complete or complete[:end].endswith(cut[0]), end
    found = collect_output(
        OutputSplitter(None, call_format, NAMES), "I say { and < and [ and <tool but call nothing. "
    )
    assert found == {
        "thinking": "",
        "content": "I say { and < and [ and <tool but call nothing. ",
        "calls": [],
    }


@pytest.mark.parametrize("call_format", all_formats(), ids=lambda call_format: call_format.name)
def test_forced_calls_follow_the_schema_and_are_parsed(call_format: ToolCallFormat) -> None:
    tools = chat_tools(WEATHER, tool_choice="required")
    grammar = GrammarCompiler(FakeModel(), lambda _: pytest.fail("not llama.cpp's"))(
        tools.constraint(call_format)
    )
    before, after = call_format.forced_frame("weather")
    begin, between, end = call_format.wrappers
    call = before + json.dumps(ARGUMENTS) + after
    texts = [begin + call + end]
    if between is not None:
        texts.append(begin + call + between + call + end)
    for count, text in enumerate(texts, 1):
        matcher = grammar.start()
        for token in text.encode():
            assert matcher.allows(token), (text, chr(token))
            matcher.accept(token)
        assert matcher.is_accepting
        assert (
            collect_output(OutputSplitter(None, call_format, NAMES), text)["calls"]
            == [("weather", ARGUMENTS)] * count
        )
    matcher = grammar.start()
    wrong = (begin + before + '{"town').encode()
    assert not all(matcher.allows(token) and (matcher.accept(token) or True) for token in wrong)


def start_matcher(call_constraint: Constraint) -> Matcher:
    """Return a matcher at the beginning of the constraint's grammar, over a vocabulary of bytes."""
    return GrammarCompiler(FakeModel(), lambda _: pytest.fail("not llama.cpp's"))(
        call_constraint
    ).start()


def accepts(matcher: Matcher, text: str) -> bool:
    """Accept the text up to the first byte that the grammar forbids. Return whether all bytes were
    accepted.
    """
    for token in text.encode():
        if not matcher.allows(token):
            return False
        matcher.accept(token)
    return True


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


@pytest.mark.parametrize("call_format", all_formats(), ids=lambda call_format: call_format.name)
def test_optional_calls_are_constrained_from_their_mark_on(call_format: ToolCallFormat) -> None:
    tools = chat_tools(STRICT)
    call_constraint, text_before = (
        tools.interleaved_constraint(call_format),
        "" if call_format.starts_answer else 'I look {"it": "up"} <now. ',
    )
    begin, _, end = call_format.wrappers
    free = start_matcher(call_constraint)
    assert accepts(free, 'Nothing { "binds" < this [1] text.\n\nä 日 ')
    assert free.is_accepting
    for mark, (before, after) in call_format.optional_frames("weather").items():
        opening = begin + before
        assert opening.startswith(mark)
        matcher = start_matcher(call_constraint)
        assert accepts(matcher, text_before + opening + JSON + after + end), (mark, opening)
        assert matcher.is_accepting
        if not call_format.ends_answer:
            assert accepts(matcher, " And that is all.")
            assert matcher.is_accepting
        text = text_before + opening + JSON + after + end
        assert collect_output(OutputSplitter(None, call_format, NAMES), text)["calls"] == [
            ("weather", ARGUMENTS)
        ]
        assert accepts(start_matcher(call_constraint), text_before + mark[:-1] + "no mark")
        assert not accepts(
            start_matcher(call_constraint), text_before + opening.replace("weather", "wether")
        )
        assert not accepts(start_matcher(call_constraint), text_before + opening + '{"town')
        assert not accepts_answer(call_constraint, text_before + mark)


def accepts_answer(call_constraint: Constraint, text: str) -> bool:
    """Return whether the grammar allows this text as a complete answer."""
    matcher = start_matcher(call_constraint)
    assert accepts(matcher, text)
    return matcher.is_accepting


def test_parallel_tool_calls_decides_whether_calls_may_repeat() -> None:
    call = WRITTEN["hermes"][0]
    several, single = (
        chat_tools(STRICT, OTHER, parallel_tool_calls=parallel).interleaved_constraint(
            find_format("")
        )
        for parallel in (True, False)
    )
    assert accepts_answer(several, f"One {call}\nand {call}{call} done")
    assert accepts_answer(single, f"One {call} done")
    assert not accepts(start_matcher(single), f"One {call} and {call}")
    loose_call = call.replace("weather", "other").replace(JSON, '{"any": [1, {}]}')
    assert accepts_answer(several, loose_call)
    assert not accepts(start_matcher(several), loose_call.replace('{"any', '["any'))


class CommonWordCalls(HermesCalls):
    """A format whose opening mark is a common word, so that a small story model writes it."""

    name = "the"
    openings = (" the",)
    closings = (" end",)

    def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
        inner = text_between(text, " the", " end", is_last)
        return inner and ParsedCalls(read_calls(json.loads(inner[0])), inner[1])


def test_a_model_writes_a_valid_call_after_the_mark(stories_runner: Runner) -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"enum": ["Monday", "Sunday"]}, "far": {"type": "boolean"}},
        "required": ["day", "far"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "walk", "parameters": schema, "strict": True}}
    tools, call_format, n_calls = (
        chat_tools(tool, parallel_tool_calls=False),
        CommonWordCalls(),
        0,
    )
    grammar = stories_runner.grammars(tools.interleaved_constraint(call_format))
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
        found = collect_output(OutputSplitter(None, call_format), reply.answer.text)
        assert " the" not in found["content"], reply.answer.text
        for name, arguments in found["calls"]:
            assert name == "walk"
            jsonschema.validate(arguments, schema)
        n_calls += len(found["calls"])
    assert n_calls


def test_a_json_document_may_replace_a_call() -> None:
    tools = chat_tools(WEATHER)
    call_constraint = tools.constraint(
        find_format(""),
        AnswerSchema({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}),
    )
    matcher = GrammarCompiler(FakeModel(), lambda _: pytest.fail("not llama.cpp's"))(
        call_constraint
    ).start()
    for token in b'{"a": 1}':
        assert matcher.allows(token)
        matcher.accept(token)
    assert matcher.is_accepting


@pytest.mark.parametrize("call_format", all_formats(), ids=lambda call_format: call_format.name)
def test_streamed_arguments_join_to_the_complete_arguments(call_format: ToolCallFormat) -> None:
    begin, between, end = call_format.wrappers
    before, after = call_format.forced_frame("weather")
    calls = [
        before + text + after
        for text in (JSON, json.dumps({"city": 'x\\"}]', "more": [{"a": {}}, "é"]}))
    ]
    text = begin + (between or "").join(calls if between is not None else calls[:1]) + end
    text = (
        ("" if call_format.starts_answer else "I look.\n")
        + text
        + ("" if call_format.ends_answer else "\nDone.")
    )
    splitters = [OutputSplitter(None, call_format, NAMES) for _ in range(2)]
    pieces = [p for letter in text for p in splitters[0].feed(letter)] + splitters[0].finish()
    at_once = splitters[1].feed(text) + splitters[1].finish()
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
    ("text", "content", "calls"),
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
def test_streamed_calls_are_final_and_other_text_is_content(
    text: str, content: str, calls: list[str]
) -> None:
    for step in (1, 5, len(text)):
        splitter = OutputSplitter(None, find_format(""), frozenset())
        chunks = [text[at : at + step] for at in range(0, len(text), step)]
        out = [piece for part in chunks for piece in splitter.feed(part)] + splitter.finish()
        assert [
            piece.call.arguments for piece in out if piece.kind == "call_end" and piece.call
        ] == calls
        assert (
            "".join(piece.text for piece in out if piece.kind == "content").strip()
            == content.strip()
        )


def test_cut_off_arguments_are_parsed_partially() -> None:
    text = '{"a": 1.5, "b": [1, {"c": "d, \\"e"}, true], "f": {"g": null, "h": []}, "i": "j"}'
    for end in range(len(text) + 1):
        assert parse_partial_arguments(text[:end]) == (
            jiter.from_json(text[:end].encode(), partial_mode=True) if end else {}
        ), end
    assert parse_partial_arguments("{'a': 1}") == {} == parse_partial_arguments("[1]")
    assert parse_partial_arguments('{"a": 1, "b": NaN}') == {"a": 1}  # JSON has no NaN


def test_thinking_content_and_several_calls_are_separated() -> None:
    call = WRITTEN["hermes"][0]
    text = f"<think>\nLet me look.\n</think>\n\nI look it up.\n\n{call}\n{call}\n"
    for seed in range(20):
        found = collect_output(OutputSplitter(None, find_format(""), NAMES), text, seed)
        assert found["thinking"] == "Let me look.\n"
        assert found["content"] == "I look it up."
        assert found["calls"] == [("weather", ARGUMENTS)] * 2
        thinking_opened = collect_output(
            OutputSplitter(ThinkingTags("<think>", "</think>"), None), "hm\n</think>\n\nyes", seed
        )
        assert thinking_opened == {"thinking": "hm\n", "content": "yes", "calls": []}
        other_tag = collect_output(
            OutputSplitter(ThinkingTags("<think>", "</think>"), None),
            "see [/THINK]</think>yes",
            seed,
        )  # [/THINK] is a tag of another model
        assert other_tag == {"thinking": "see [/THINK]", "content": "yes", "calls": []}


def test_json_without_a_known_function_is_content_in_a_format_without_tags() -> None:
    call_format = find_format("<|python_tag|>")
    for text in (
        '{"name": "other", "parameters": {}}',
        '{"name": 5}',
        "{\n  1",
        'Text. {"name": "weather"}',
    ):
        assert collect_output(OutputSplitter(None, call_format, NAMES), text)["content"] == text


@pytest.mark.parametrize("call_format", all_formats(), ids=lambda call_format: call_format.name)
def test_repeated_opening_marks_are_not_parsed_each_time(call_format: ToolCallFormat) -> None:
    n_parses = 0

    class Counting(type(call_format)):
        def parse(self, text: str, is_last: bool) -> ParsedCalls | None:
            nonlocal n_parses
            n_parses += 1
            return super().parse(text, is_last)

    splitter, text = OutputSplitter(None, Counting(), NAMES), call_format.openings[0] * 500
    assert "".join(piece.text for piece in [*splitter.feed(text), *splitter.finish()]) == text
    assert 0 < n_parses < 100


def test_all_marks_are_listed_and_hermes_is_the_last_format() -> None:
    assert {"<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"} <= set(call_marks())
    assert all_formats()[-1].name == "hermes"  # fits every template


def test_a_constraint_for_a_single_call_has_no_separator() -> None:
    single = chat_tools(WEATHER, tool_choice="required", parallel_tool_calls=False)
    assert (
        constraint.read_tool_calls(single.constraint(find_format("")).text).syntaxes[0].between
        is None
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
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
def test_argument_values_of_all_types_are_parsed(name: str, text: str, expected: dict) -> None:
    call_format = next(piece for piece in all_formats() if piece.name == name)
    assert collect_output(OutputSplitter(None, call_format, NAMES), text) == {
        "thinking": "",
        "content": "",
        "calls": [("f", expected)],
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
def test_invalid_calls_become_content_and_are_not_run(name: str, text: str) -> None:
    call_format = next(piece for piece in all_formats() if piece.name == name)
    assert collect_output(OutputSplitter(None, call_format, NAMES), text)["content"] == text
