"""The models of requests are true: an honored field changes the request to the engine or its
response, one without effect changes neither, and a refused one is refused by name.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.api.bodies.base import RequestBody
from llmcli.api.bodies.sampling_fields import SETTING_NAMES
from llmcli.api.errors import ApiError
from llmcli.api.forms import FORMS
from llmcli.api.forms.ollama import OllamaOptions
from llmcli.errors import UserError
from llmcli.runtime.sampling import sampling_settings
from tests.api.forms.test_openai_chat import HELLO
from tests.fixtures.fakes import FakeModel
from tests.fixtures.server import Served

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RESPONSES_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "look", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
TEMPLATE = (
    "{{ enable_thinking }}{{ reasoning_effort }}{{ documents }}{{ mood }}"
    "{% for tool in tools or [] %}{{ tool }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GAP = {"input_prefix": "a", "input_suffix": "b"}
# The smallest request of each API.
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "ask"},
    "/v1/responses": {"input": "ask"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 40},
    "/completion": {"prompt": "ask"},
    "/infill": GAP,
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "ask", "stream": False},
}
# A value of each honored field that has an effect. The fields that an API needs are not here.
VALUES: dict[str, Any] = {
    "stream": True,
    "stop": "l",
    "stop_sequences": ["l"],
    "n": 2,
    "n_cmpl": 2,
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "n_predict": 2,
    "num_predict": 2,
    "id_slot": 1,
    "verbose": True,
    "logit_bias": {"104": -1},
    "logprobs": True,
    "n_probs": 2,
    "response_format": {"type": "json_object"},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "format": "json",
    "text": {"format": {"type": "json_object"}},
    "json_schema": SCHEMA,
    "grammar": 'root ::= "hi"',
    "guided_json": SCHEMA,
    "guided_regex": "[a-z]{3}",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "hi"',
    "structured_outputs": {"choice": ["yes"]},
    "allowed_token_ids": [104, 105],
    "stop_token_ids": [108],
    "min_tokens": 3,
    "ignore_eos": True,
    "samplers": ["top_k"],
    "n_indent": 2,
    "t_max_predict_ms": 500,
    "priority": 5,
    "beams": 2,
    "tools": [TOOL],
    "reasoning_effort": "low",
    "reasoning": {"effort": "low"},
    "enable_thinking": False,
    "thinking_budget_tokens": 5,
    "reasoning_budget_tokens": 5,
    "thinking_token_budget": 5,
    "endless": True,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "think": True,
    "output_config": {"effort": "low"},
    "chat_template_kwargs": {"mood": "glad"},
    "documents": [{"text": "a"}],
    "add_generation_prompt": False,
    "truncate_prompt_tokens": 2,
    "echo": True,
    "return_tokens": True,
    "response_fields": ["content"],
    "include": ["message.output_text.logprobs"],
    "instructions": "Be brief.",
    "system": "Be brief.",
    "metadata": {"a": "b"},
    "suffix": "end",
    "add_special_tokens": False,
    "input_extra": [{"text": "more"}],
    "prompt": "go",
    "context": [104],
    "raw": True,
    "template": "Q: {{ .Prompt }}",
    "options": {"num_predict": 2},
}
# Fields that have an effect only together with others: field -> it and the other fields.
COMBINED: dict[str, dict[str, Any]] = {
    "return_progress": {"stream": True, "return_progress": True},
    "timings_per_token": {"stream": True, "timings_per_token": True},
    "length_penalty": {"beams": 2, "length_penalty": 2.0},
    "early_stopping": {"beams": 2, "early_stopping": "never"},
    "use_beam_search": {"n": 2, "use_beam_search": True},
    "post_sampling_probs": {"n_probs": 1, "post_sampling_probs": True},
    "return_tokens_as_token_ids": {"n_probs": 1, "return_tokens_as_token_ids": True},
    "truncation_side": {"truncate_prompt_tokens": 2, "truncation_side": "right"},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "best_of": {"best_of": 2},
}
RESPONSES_LOGPROBS = {"include": ["message.output_text.logprobs"]}
# Values that differ from those above in some APIs.
OWN_VALUES: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/responses", "tools"): {"tools": [RESPONSES_TOOL]},
    ("/v1/responses", "tool_choice"): {"tools": [RESPONSES_TOOL], "tool_choice": "required"},
    ("/v1/responses", "parallel_tool_calls"): {
        "tools": [RESPONSES_TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    ("/v1/messages", "tools"): {"tools": [ANTHROPIC_TOOL]},
    ("/v1/messages", "tool_choice"): {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
    ("/v1/completions", "logprobs"): {"logprobs": 1},
    # an answer of a chosen length may repeat itself anyway
    **{
        (path, "endless"): {"endless": False} for path in ("/v1/messages", "/completion", "/infill")
    },
    ("/completion", "logprobs"): {"logprobs": 1},
    ("/infill", "logprobs"): {"logprobs": 1},
    **{
        ("/v1/responses", name): {**RESPONSES_LOGPROBS, name: True}
        for name in ("post_sampling_probs", "return_tokens_as_token_ids")
    },
}
# Fields whose effect does not show in a request to a server with one model, each with the test that
# shows it.
ELSEWHERE = {
    "model": "any name has the same answer",
    "messages": "required",
    "input": "required",
    "input_prefix": "required",
    "input_suffix": "required",
    "top_logprobs": "test_forms",
    "n_keep": "test_context_shift",
    "num_keep": "test_context_shift",
    "truncate": "test_request_fields",
    "truncation": "test_request_fields",
    "context_management": "test_request_fields",
    "continue_final_message": "test_request_fields",
    "reasoning_format": "test_request_fields",
    "parse_tool_calls": "test_request_fields",
    "include_reasoning": "test_request_fields",
}
NO_BEAMS = {"beams", "length_penalty", "early_stopping", "use_beam_search"}
NO_LOGPROBS = {"post_sampling_probs", "return_tokens_as_token_ids"}
# Honored fields that an API of one answer or without log-probabilities refuses or does not show.
NOT_SHOWN = {
    "/v1/responses": NO_BEAMS,
    "/v1/messages": NO_BEAMS | NO_LOGPROBS,
    "/completion": NO_BEAMS,
    "/infill": NO_BEAMS,
    "/api/chat": NO_BEAMS | NO_LOGPROBS,
    "/api/generate": NO_BEAMS | NO_LOGPROBS,
}


@pytest.fixture
def fields_server(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server of a fake model that can fill gaps."""
    tokens = {"pre": ord("P"), "suf": ord("S"), "mid": ord("M"), "sep": ord("F")}
    monkeypatch.setattr(FakeModel, "fim_tokens", tokens)
    return serve(template=TEMPLATE, n_ctx=2048)


def requests_of(served: Served, path: str, document: dict[str, Any]) -> str:
    """Return what the engine receives for a request, as text."""
    form = FORMS[path](document, served.bridge.runner, served.settings)
    return f"{form.requests!r} {form.constraint!r} {form.n_samples}"


def response_of(served: Served, path: str, document: dict[str, Any]) -> Any:
    """Return the response to a request without what differs between two equal requests."""
    answer = httpx.post(served.url + path, json=document, timeout=30)
    assert answer.status_code == 200, (path, document, answer.text)
    if answer.headers["content-type"] == "application/json":
        return _without(answer.json(), VARYING)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [_without(json.loads(line), VARYING) for line in lines if line.startswith("{")]


VARYING = {
    "id",
    "created",
    "created_at",
    "timings",
    "usage",
    "prompt_eval_duration",
    "eval_duration",
    "total_duration",
    "completed_at",
    "tokens_cached",
    "seed",
}


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(entry, names) for name, entry in value.items() if name not in names}
    return [_without(entry, names) for entry in value] if isinstance(value, list) else value


def differs(
    served: Served, path: str, fields: dict[str, Any], other_fields: dict[str, Any]
) -> bool:
    """Return whether two requests are different for the engine, or else have different responses.
    The arguments are what they have in addition to the smallest request.
    """
    changed, plain = {**SMALLEST[path], **fields}, {**SMALLEST[path], **other_fields}
    if requests_of(served, path, changed) != requests_of(served, path, plain):
        return True
    return bool(response_of(served, path, changed) != response_of(served, path, plain))


def setting_value(name: str) -> Any:
    """Return a value of a sampling setting that is not the default."""
    setting = SETTING_NAMES[name]
    for value in (1, 3, 0.5, ["x"], True):
        try:
            if setting.parse(value) != sampling_settings()[setting.name].default:
                return value
        except UserError:
            continue
    raise AssertionError(name)


def field_cases(path: str, body_type: type[RequestBody]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the honored fields of an API with values that have an effect."""
    skipped = ELSEWHERE.keys() | NOT_SHOWN.get(path, set()) | SMALLEST[path].keys() - {"stream"}
    for name, effect in body_type.effects().items():
        if effect.effect != "honored" or name in skipped:
            continue
        if name in SETTING_NAMES:
            yield name, {name: setting_value(name)}
        elif (path, name) in OWN_VALUES:
            yield name, OWN_VALUES[path, name]
        else:
            yield name, COMBINED.get(name) or {name: VALUES[name]}


@pytest.mark.parametrize("path", SMALLEST)
def test_an_honored_field_changes_the_request_or_its_response(
    fields_server: Served, path: str
) -> None:
    body_type = FORMS[path].body_type
    unchanged = [
        name
        for name, fields in field_cases(path, body_type)
        if not differs(fields_server, path, fields, _without(fields, {name}))
    ]
    assert not unchanged


def test_an_honored_option_of_ollama_changes_the_request(fields_server: Served) -> None:
    unchanged = [
        name
        for name, fields in field_cases("/api/chat", OllamaOptions)
        if not differs(
            fields_server,
            "/api/chat",
            {"options": fields},
            {"options": _without(fields, {name})},
        )
    ]
    assert not unchanged


@pytest.mark.parametrize("path", SMALLEST)
def test_a_field_without_effect_changes_nothing(fields_server: Served, path: str) -> None:
    effects = FORMS[path].body_type.effects()
    for effect in ("ignored", "noted"):
        names = [name for name, entry in effects.items() if entry.effect == effect]
        fields: dict[str, Any] = dict.fromkeys(names, True)
        plain, changed = SMALLEST[path], {**SMALLEST[path], **fields}
        assert requests_of(fields_server, path, changed) == requests_of(fields_server, path, plain)
        form = FORMS[path](changed, fields_server.bridge.runner, fields_server.settings)
        assert len(form.notes) == (len(names) if effect == "noted" else 0)


@pytest.mark.parametrize("path", SMALLEST)
def test_a_refused_field_is_refused_by_name_and_harmless_values_are_not(
    fields_server: Served, path: str
) -> None:
    effects = FORMS[path].body_type.effects()
    for name, entry in effects.items():
        if entry.effect != "refused":
            continue
        for value in (True, "something", 17, {"a": 1}, ["x"]):
            if not entry.refuses(value):
                continue
            with pytest.raises(ApiError) as caught:
                requests_of(fields_server, path, {**SMALLEST[path], name: value})
            assert str(caught.value.param).split("[")[0] == name
            assert name in str(caught.value)
        plain = requests_of(fields_server, path, SMALLEST[path])
        for value in (None, *entry.harmless):
            assert requests_of(fields_server, path, {**SMALLEST[path], name: value}) == plain, name


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("top-p", "top_p"),
        ("responseFormat", "response_format"),
        ("tool_choise", "tool_choice"),
    ],
)
def test_a_misspelled_field_is_refused_with_the_right_name(
    fields_server: Served, name: str, spelled: str
) -> None:
    with pytest.raises(ApiError, match=f"did you mean {spelled}") as caught:
        requests_of(
            fields_server, "/v1/chat/completions", {**SMALLEST["/v1/chat/completions"], name: 1}
        )
    assert caught.value.param == name


@pytest.mark.parametrize("path", SMALLEST)
def test_an_unknown_field_is_noted_in_the_answer(fields_server: Served, path: str) -> None:
    document = {**SMALLEST[path], "zzz_of_a_later_version": {"a": [1]}}
    found = response_of(fields_server, path, document)
    assert found["notes"] == [f"zzz_of_a_later_version is not a field of {path} and was ignored"]
    streamed = httpx.post(fields_server.url + path, json={**document, "stream": True}).text
    assert streamed.count("zzz_of_a_later_version") == 1


def test_many_unknown_fields_are_refused(fields_server: Served) -> None:
    document = {**SMALLEST["/completion"], **{f"zz{number}": 1 for number in range(100_000)}}
    with pytest.raises(ApiError, match="more than 64 unknown fields"):
        requests_of(fields_server, "/completion", document)
    long = {**SMALLEST["/completion"], "z" * 1_000_000: 1}
    form = FORMS["/completion"](long, fields_server.bridge.runner, fields_server.settings)
    assert all(len(note) < 200 for note in form.notes)
