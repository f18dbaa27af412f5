"""Fields that change how a request is read: what is left out of it, continued, shortened or limited."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import openai
import pytest

from llmcli.api.forms import FORMS
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served

FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
LOOK = {"type": "function", "function": FUNCTION}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = b"<think>\nhm\n</think>\n\nyes"


def form_of(served: Served, path: str, **body: Any) -> Any:
    """Return the parsed request."""
    return FORMS[path](body, served.bridge.runner, served.settings)


def prompt_of(served: Served, path: str, **body: Any) -> str:
    """Return the text of the prompt that the engine receives."""
    (request,) = form_of(served, path, **body).requests
    model = served.bridge.runner.model
    return b"".join(model.piece(token, special=True) for token in request.tokens).decode()


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    """Return the response to a request, which is answered."""
    answer = httpx.post(served.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(served: Served, path: str, **body: Any) -> dict[str, Any]:
    """Return the error of a request, which is refused."""
    answer = httpx.post(served.url + path, json=body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize(
    ("path", "tools", "fields"),
    [
        (
            "/v1/chat/completions",
            [{"type": "web_search"}, LOOK, {"type": "mcp", "server_url": "x"}],
            {"messages": HELLO},
        ),
        (
            "/v1/responses",
            [
                {"type": "web_search", "filters": {"any": 1}},
                {"type": "function", **FUNCTION},
                {"type": "file_search", "vector_store_ids": ["x"]},
            ],
            {"input": "x"},
        ),
        (
            "/v1/messages",
            [
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
                {"name": "look", "input_schema": {"type": "object"}},
                {"type": "code_execution_20250522", "name": "code_execution"},
            ],
            {"messages": HELLO, "max_tokens": 9},
        ),
        (
            "/api/chat",
            [{"type": "web_search"}, LOOK, {"type": "other"}],
            {"messages": HELLO, "stream": False},
        ),
    ],
)
def test_unknown_types_of_tools_are_left_out_with_a_note(
    serve: Callable[..., Served], path: str, tools: list[Any], fields: dict[str, Any]
) -> None:
    served = serve(template=TEMPLATE)
    found = post(served, path, tools=tools, **fields)
    assert [note.split(" was left out")[0] for note in found["notes"]] == ["tools[0]", "tools[2]"]
    assert tools[0]["type"] in found["notes"][0]
    assert prompt_of(served, path, tools=tools, **fields).count("[") == 1


def test_tools_that_anthropics_clients_run_get_their_schema(serve: Callable[..., Served]) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    served = serve(template=TEMPLATE)
    form = form_of(served, "/v1/messages", messages=HELLO, max_tokens=9, tools=tools)
    names = {tool.name: tool.parameters["properties"].keys() for tool in form.prompt.tools.tools}
    assert names["bash"] == {"command", "restart"}
    assert {"command", "path"} <= names["str_replace_based_edit_tool"]


def test_a_custom_tool_is_called_with_a_text(serve: Callable[..., Served]) -> None:
    call = b'<tool_call>\n{"name": "shell", "arguments": {"input": "ls"}}\n</tool_call>'
    custom = {"name": "shell", "description": "runs a command"}
    with client(serve(call, template=TEMPLATE, n_ctx=2048)) as api:
        chat = api.chat.completions.create(
            model="x", messages=HELLO, tools=[{"type": "custom", "custom": custom}]
        )
        (found,) = chat.choices[0].message.tool_calls
        assert (found.type, found.custom.name, found.custom.input) == ("custom", "shell", "ls")
        response = api.responses.create(model="x", input="x", tools=[{"type": "custom", **custom}])
    (item,) = [item for item in response.output if item.type == "custom_tool_call"]
    assert (item.name, item.input) == ("shell", "ls")


def test_allowed_tools_are_the_only_ones(serve: Callable[..., Served]) -> None:
    tools = [LOOK, {"type": "function", "function": {**FUNCTION, "name": "hear"}}]
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "hear"}}],
        },
    }
    served = serve(template=TEMPLATE)
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
    assert prompt_of(served, "/v1/chat/completions", **body).startswith("<s>[hear]<user>")
    choice["allowed_tools"]["tools"][0]["function"]["name"] = "taste"
    error = refusal(served, "/v1/chat/completions", **body)
    assert "'taste', which is not in tools" in error["message"]


def test_an_assistants_message_at_the_end_is_continued(serve: Callable[..., Served]) -> None:
    served = serve()
    begun = [*HELLO, {"role": "assistant", "content": "I say "}]
    for path, fields in {
        "/v1/chat/completions": {},
        "/v1/messages": {"max_tokens": 9},
        "/api/chat": {},
    }.items():
        prompt = prompt_of(served, path, messages=begun, **fields)
        assert prompt.endswith("<assistant>I say")
    plain = prompt_of(served, "/v1/chat/completions", messages=begun, continue_final_message=False)
    assert plain.endswith("<assistant>I say \n<assistant>")
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = prompt_of(served, "/v1/chat/completions", messages=begun, **explicit)
    assert prompt.endswith("<assistant>I say")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    error = refusal(served, "/v1/chat/completions", messages=begun, **both)
    assert "exclude each other" in error["message"]


def test_text_parts_are_joined_by_line_ends(serve: Callable[..., Served]) -> None:
    served = serve()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    for path, fields in {"/v1/chat/completions": {}, "/v1/messages": {"max_tokens": 9}}.items():
        assert "<user>one\ntwo\n" in prompt_of(served, path, messages=messages, **fields)
    items = [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}]
    assert "<user>one\ntwo\n" in prompt_of(served, "/v1/responses", input=items)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_minus_one_is_no_limit(serve: Callable[..., Served], name: str) -> None:
    served = serve(max_tokens=3)
    unlimited = form_of(served, "/v1/chat/completions", messages=HELLO, **{name: -1})
    assert unlimited.requests[0].max_tokens == 3  # the server's default
    error = refusal(served, "/v1/chat/completions", messages=HELLO, **{name: -2})
    assert error["param"] == name


def test_limits_of_stops_tools_and_names_are_those_of_the_apis(
    serve: Callable[..., Served],
) -> None:
    served = serve(n_ctx=4096)
    stops = [f"stop{number}" for number in range(100)]
    form = form_of(served, "/v1/chat/completions", messages=HELLO, stop=stops)
    assert len(form.requests[0].stops) == 100
    names = ["n" * 128, "with.dots-and_dashes", *(f"f{number}" for number in range(200))]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    served = serve(template=TEMPLATE, n_ctx=4096)
    form = form_of(served, "/v1/chat/completions", messages=HELLO, tools=tools)
    assert {tool.name for tool in form.prompt.tools.tools} == set(names)
    tools[0]["function"]["name"] = "n" * 129
    error = refusal(served, "/v1/chat/completions", messages=HELLO, tools=tools)
    assert error["param"] == "tools[0].function.name"


def test_a_long_conversation_loses_its_first_turns_only_if_the_request_says_so(
    serve: Callable[..., Served],
) -> None:
    served = serve(n_ctx=256)
    turns = [
        {"role": role, "content": f"{number} {'x' * 40}"}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    turns = [{"role": "system", "content": "rule"}, *turns, {"role": "user", "content": "last"}]
    for path, name, switch in (
        ("/v1/responses", "input", {"truncation": "auto"}),
        ("/api/chat", "messages", {"truncate": True, "stream": False}),
    ):
        answer = httpx.post(served.url + path, json={name: turns})
        assert (answer.status_code, "context" in answer.text) == (400, True)
        prompt = prompt_of(served, path, **{name: turns}, **switch)
        assert prompt.startswith("<s><system>rule\n<user>")
        assert "<user>last\n" in prompt
        assert "<user>0 " not in prompt
        assert len(prompt) < 256 * 3 / 4  # a quarter of the context remains for the answer
        found = post(served, path, **{name: turns}, **switch)
        assert "messages were left out: the context is too small" in found["notes"][0]


def test_a_prompt_is_shortened_at_the_side_that_the_request_says(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    text = {"prompt": "abcdef", "truncate_prompt_tokens": 3}
    assert prompt_of(served, "/v1/completions", **text).endswith("def")
    assert prompt_of(served, "/v1/completions", **text, truncation_side="right").endswith("ab")


def test_edits_of_a_conversation_are_refused_only_if_they_would_clear_something(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 1000},
    }
    body = {"messages": HELLO, "max_tokens": 9, "context_management": {"edits": [edit]}}
    assert post(served, "/v1/messages", **body)["context_management"] == {"applied_edits": []}
    edit["trigger"]["value"] = 3
    assert "never does" in refusal(served, "/v1/messages", **body)["message"]
    compaction = {"context_management": [{"type": "compaction", "compact_threshold": 3}]}
    error = refusal(served, "/v1/responses", input="long text", **compaction)
    assert "never summarizes" in error["message"]
    compaction["context_management"][0]["compact_threshold"] = 1000
    post(served, "/v1/responses", input="long text", **compaction)


def test_thinking_is_separate_left_in_the_text_or_left_out(serve: Callable[..., Served]) -> None:
    served = serve(THINKING)
    for fields, expected in (
        ({}, ("yes", "hm\n")),
        ({"reasoning_format": "none"}, (THINKING.decode(), None)),
        ({"include_reasoning": False}, ("yes", None)),
        ({"reasoning": {"exclude": True}}, ("yes", None)),
    ):
        with client(served) as api:
            request = {"model": "x", "messages": HELLO, "extra_body": fields}
            message = api.chat.completions.create(**request).choices[0].message
            stream = api.chat.completions.create(**request, stream=True)
            deltas = [chunk.choices[0].delta for chunk in stream]
        assert (message.content, getattr(message, "reasoning_content", None)) == expected
        content, thinking = (
            "".join(getattr(delta, name, None) or "" for delta in deltas)
            for name in ("content", "reasoning_content")
        )
        assert (content, thinking or None) == expected


def test_tool_calls_are_separate_or_left_in_the_text(serve: Callable[..., Served]) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    served = serve(call.encode(), template=TEMPLATE)
    body = {"messages": HELLO, "tools": [LOOK]}
    message = post(served, "/v1/chat/completions", **body)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "look"
    found = post(served, "/v1/chat/completions", **body, parse_tool_calls=False)["choices"][0]
    assert found["message"]["content"] == call
    assert "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({"thinking": {"type": "disabled", "display": "omitted"}}, ["thinking.display"]),
        ({"thinking": {"type": "disabled", "display": "summarized", "budget_tokens": None}}, []),
        ({"return_progress": True}, ["return_progress"]),
        ({"return_progress": False}, []),
    ],
)
def test_a_value_that_asks_for_nothing_leads_to_no_note(
    serve: Callable[..., Served], fields: dict[str, Any], notes: list[str]
) -> None:
    found = post(serve(), "/v1/messages", messages=HELLO, max_tokens=9, **fields)
    assert [note.split(" ")[0] for note in found.get("notes", ())] == notes


def test_zero_is_not_false(serve: Callable[..., Served]) -> None:
    """llama-server does not think with a budget of 0, which only conversations have here."""
    served = serve()
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"):
        error = refusal(served, "/v1/completions", prompt="x", **{name: 0})
        assert (error["param"], "chat completions" in error["message"]) == (name, True)
        post(served, "/v1/completions", prompt="x", **{name: -1})


def test_blocks_of_documents_and_of_server_tools(serve: Callable[..., Served]) -> None:
    served = serve()
    question = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "A ship."},
            "title": "Log",
        },
        {
            "type": "search_result",
            "source": "harbor",
            "title": "Tides",
            "content": [{"type": "text", "text": "High at noon."}],
        },
        {"type": "text", "text": "When?"},
    ]
    answer = [
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
        {"type": "text", "text": "Let me see."},
    ]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And?"},
    ]
    body = {"messages": messages, "max_tokens": 9}
    prompt = prompt_of(served, "/v1/messages", **body)
    for text in ("Log\n\nA ship.", "Tides\nharbor\n\nHigh at noon.", "When?", "Let me see."):
        assert text in prompt
    notes = post(served, "/v1/messages", **body)["notes"]
    assert [note.split(" was")[0] for note in notes] == [
        "messages[1].content[0]",
        "messages[1].content[1]",
    ]
    question[0]["source"] = {"type": "url", "url": "x"}
    assert "reads only text" in refusal(served, "/v1/messages", **body)["message"]


def test_items_of_tools_that_only_openais_server_runs_are_left_out(
    serve: Callable[..., Served],
) -> None:
    items = [
        {"role": "user", "content": "Find it."},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"q": ["x"]}},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": "And?"},
    ]
    found = post(serve(), "/v1/responses", input=items)
    assert [note.split(" was")[0] for note in found["notes"]] == ["input[1]"]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_reads_answers_with_notes(
    serve: Callable[..., Served], stream: bool
) -> None:
    extra = {"extra_body": {"unknown_of_a_later_version": 1}, "stream": stream}
    with client(serve()) as api:
        chat = api.chat.completions.create(model="gpt-9", messages=HELLO, **extra)
        last = list(chat)[-1] if stream else chat
        assert "unknown_of_a_later_version" in last.notes[0]
        response = api.responses.create(model="gpt-9", input="x", **extra)
        last = list(response)[-1].response if stream else response
        assert "unknown_of_a_later_version" in last.notes[0]
        with pytest.raises(openai.BadRequestError, match="did you mean max_completion_tokens"):
            api.chat.completions.create(
                model="x", messages=HELLO, extra_body={"max_completion_token": 1}
            )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Once"}),
        ("/completion", {"prompt": "Once"}),
        ("/api/chat", {"messages": HELLO, "stream": False}),
    ],
)
def test_a_verbose_answer_has_its_prompt(
    serve: Callable[..., Served], path: str, fields: dict[str, Any]
) -> None:
    served = serve()
    switch = {"options": {"verbose": True}} if path == "/api/chat" else {"verbose": True}
    found = post(served, path, **fields, **switch)
    assert found["__verbose"] == {"prompt": prompt_of(served, path, **fields)}
    assert "__verbose" not in post(served, path, **fields)
    served = serve(shows_prompts=True)
    refused = {"options": {"verbose": False}} if path == "/api/chat" else {"verbose": False}
    assert post(served, path, **fields)["__verbose"] == found["__verbose"]
    assert "__verbose" not in post(served, path, **fields, **refused)
