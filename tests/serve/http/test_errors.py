"""Invalid requests get OpenAI's error object with the right status, and the server continues."""

import gzip
import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from llmcli.api.forms.openai_chat import ChatForm
from llmcli.runtime.constraint.base import UnsatisfiableConstraint
from llmcli.runtime.constraint.llguidance import GrammarMatcher
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.fakes import FakeContext
from tests.fixtures.server import Served


def post(
    served: Served,
    body: bytes,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    **headers: str,
) -> Any:
    """Send raw bytes as a request's body. Return the status, the headers and the parsed body of the
    response.
    """
    connection = http.client.HTTPConnection("127.0.0.1", served.settings.port, timeout=30)
    try:
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        raw = answer.read()
        return (
            answer.status,
            dict(answer.getheaders()),
            json.loads(raw) if raw.startswith(b"{") else raw,
        )
    finally:
        connection.close()


WRONG = {
    "messages is missing": {},
    "messages is empty": {"messages": []},
    "messages must be a list": {"messages": "hello"},
    "messages[0] must be an object, not text": {"messages": ["hello"]},
    "messages[0].role must be one of": {"messages": [{"role": "robot", "content": "x"}]},
    "messages[0].content is missing": {"messages": [{"role": "user"}]},
    "messages[0].content must be text or a list of parts": {
        "messages": [{"role": "user", "content": 5}]
    },
    "messages[0].content[0]: this server reads": {
        "messages": [{"role": "user", "content": [{"type": "image_url"}]}]
    },
    "messages[1].tool_call_id is missing": {"messages": [*HELLO, {"role": "tool", "content": "x"}]},
    "temperature is 'hot'; temperature takes a number from 0 to 100": {"temperature": "hot"},
    "top_p must be from 0 to 1, not 2": {"top_p": 2},
    "max_tokens must be a whole number, not true": {"max_tokens": True},
    "max_completion_tokens must be a whole number from -1": {"max_completion_tokens": -2},
    "n must be a whole number from 1 to 128, not 0": {"n": 0},
    "stop[0] must be text, not 1": {"stop": [1]},
    "stop must be text or a list of texts, not 5": {"stop": 5},
    "stop has 1,025 entries; the limit is 1,024": {"stop": ["x"] * 1025},
    "stream must be true or false, not 'yes'": {"stream": "yes"},
    "top_logprobs needs logprobs": {"top_logprobs": 2},
    "logit_bias names token 999999": {"logit_bias": {"999999": 1}},
    "tools[0].function is missing": {"tools": [{"type": "function"}]},
    "tools has 1,025 entries; the limit is 1,024": {"tools": [{"type": "web_search"}] * 1025},
    "tools[0].function.name must be 1 to 128": {
        "tools": [{"type": "function", "function": {"name": "a" * 129}}]
    },
    "tool_choice names the function 'x'": {
        "tool_choice": {"type": "function", "function": {"name": "x"}}
    },
    "tool_choice is required, but there are no tools": {"tool_choice": "required"},
    "response_format.json_schema is missing": {"response_format": {"type": "json_schema"}},
    "response_format.json_schema.schema is missing": {
        "response_format": {"type": "json_schema", "json_schema": {}}
    },
    "cannot be enforced: uniqueItems at #/properties/a": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "schema": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
                "strict": True,
            },
        }
    },
    "cannot be enforced: an array at #/properties": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": []}}}
    },
    "function f: the schema cannot be enforced": {
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}},
            }
        ],
        "tool_choice": "required",
    },
    "grammar: the grammar is wrong in line 1": {"grammar": "root ::= ("},
    "a grammar says where the answer ends": {"grammar": 'root ::= "a"', "ignore_eos": True},
    "beams is '1000'": {"beams": 1000},
    "loaded for 6: ask for fewer, or start with a larger --parallel": {"beams": 7},
    "functions is not supported": {"functions": [{}]},
    "modalities is not supported: this server generates only text": {"modalities": ["audio"]},
    "max_token is not a field of /v1/chat/completions; did you mean max_tokens": {"max_token": 5},
    "json_schema and grammar both constrain the answer": {
        "json_schema": {"type": "object"},
        "grammar": 'root ::= "a"',
    },
    "samplers: ": {"samplers": ["top_kk"]},
    "stop_token_ids": {"stop_token_ids": [100_000]},
    "structured_outputs.regex": {"structured_outputs": {"regex": 5}},
    "min_tokens": {"min_tokens": -1},
    "reasoning_effort must be one of none": {"reasoning_effort": "huge"},
    "reasoning.effort must be one of none": {"reasoning": {"object": 1, "effort": "huge"}},
    "chat_template_kwargs.messages is set by the server": {
        "chat_template_kwargs": {"messages": []}
    },
    "continue_final_message needs an assistant's message at the end": {
        "continue_final_message": True
    },
}


def test_every_wrong_field_is_named_by_its_path(serve: Callable[..., Served]) -> None:
    served = serve()
    for message, body in WRONG.items():
        body_with_messages = body if message.startswith("messages") else {"messages": HELLO, **body}
        status, _, found = post(served, json.dumps(body_with_messages).encode())
        assert (status, found["error"]["type"]) == (400, "invalid_request_error"), (message, found)
        assert message in found["error"]["message"], found
    assert (
        client(served)
        .chat.completions.create(model="tiny", messages=HELLO)
        .choices[0]
        .message.content
        == "hello"
    )


RAW = {
    b"{": "the body is not JSON",
    b"[]": "must be a JSON object",
    b"": "the body is not JSON",
    b"\xff{}": "not UTF-8",
    b'{"temperature": NaN}': "NaN is no number of JSON",
    b"[" * 200_000: "nested too deeply",
    b'{"max_tokens": 1' + b"0" * 5000 + b"}": "the body is not JSON",
}


def test_invalid_json_is_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    for body, message in RAW.items():
        status, _, found = post(served, body)
        assert status == 400
        assert message in found["error"]["message"]


def test_a_compressed_body_is_refused(serve: Callable[..., Served]) -> None:
    compressed = gzip.compress(json.dumps({"messages": HELLO}).encode())
    status, _, found = post(serve(), compressed, **{"content-encoding": "gzip"})
    assert (status, found["error"]["type"]) == (415, "invalid_request_error")
    assert "gzip" in found["error"]["message"]


def test_ten_megabytes_are_refused_even_in_chunks(serve: Callable[..., Served]) -> None:
    served = serve()
    large = b'{"messages": "' + b"x" * 10_000_000 + b'"}'
    assert post(served, large)[0] == 413
    connection = http.client.HTTPConnection("127.0.0.1", served.settings.port, timeout=30)
    pieces = (large[start : start + 1_000_000] for start in range(0, len(large), 1_000_000))
    connection.request("POST", "/v1/completions", pieces, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_very_long_text_is_refused_without_tokenizing_it(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    monkeypatch.setattr(served.bridge.runner.model, "tokenize", None)
    content = [{"role": "user", "content": "x" * 6_000_000}]
    for path, body in (
        ("/v1/completions", {"prompt": ["x" * 6_000_000]}),
        ("/v1/chat/completions", {"messages": content}),
        ("/v1/responses", {"input": content}),
    ):
        status, _, found = post(served, json.dumps(body).encode(), path)
        assert (status, found["error"]["code"], found["error"]["n_ctx"]) == (
            400,
            "context_length_exceeded",
            512,
        )
        assert found["error"]["n_prompt_tokens"] >= 1_500_000


def test_tokenize_has_limits(serve: Callable[..., Served]) -> None:
    served = serve()
    for body in ({"content": "x" * 2_100_000}, {"content": "x" * 200_000, "with_pieces": True}):
        status, _, found = post(served, json.dumps(body).encode(), "/tokenize")
        assert (status, "the limit" in found["error"]["message"]) == (400, True)
    assert (
        len(post(served, json.dumps({"content": "x" * 200_000}).encode(), "/tokenize")[2]["tokens"])
        == 200_000
    )


def test_the_number_of_answers_to_a_request_is_limited(serve: Callable[..., Served]) -> None:
    status, _, found = post(
        serve(), json.dumps({"prompt": ["x"] * 200, "n": 6}).encode(), "/v1/completions"
    )
    assert (status, found["error"]["param"]) == (400, "n")
    assert "1,200 answers" in found["error"]["message"]


def test_unknown_paths_and_methods_are_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    assert [
        post(served, b"", path, "GET")[0] for path in ("/nothing", "/v1/models", "/v1/models/other")
    ] == [
        404,
        200,
        404,
    ]
    status, headers, found = post(served, b"", "/v1/chat/completions", "GET")
    assert (status, headers["allow"]) == (405, "POST")
    assert "accepts POST" in found["error"]["message"]


def test_surrogates_and_control_characters_are_accepted(tiny: Served) -> None:
    for text in ("\\ud800 half", "\\u0000 zero", "\\uffff", "<|im_end|>", "{{ 7 * 7 }}", "\\u202e"):
        content = f'{{"role": "user", "content": "{text}"}}'
        body = f'{{"messages": [{content}], "max_tokens": 2, "stop": ["{text}"]}}'
        assert post(tiny, body.encode())[0] == 200


def test_a_model_without_a_template_only_continues_texts(serve: Callable[..., Served]) -> None:
    served = serve(template=None)
    status, _, found = post(served, json.dumps({"messages": HELLO}).encode())
    assert status == 400
    assert "/v1/completions" in found["error"]["message"]
    assert client(served).completions.create(model="tiny", prompt="x").choices[0].text == "hello"


def test_a_template_error_gets_status_400(serve: Callable[..., Served]) -> None:
    served = serve(template="{{ raise_exception('roles must alternate') }}")
    status, _, found = post(served, json.dumps({"messages": HELLO}).encode())
    assert status == 400
    assert "roles must alternate" in found["error"]["message"]


def test_a_full_queue_gets_retry_after(serve: Callable[..., Served]) -> None:
    may_continue = threading.Event()

    def reply(tokens: Any) -> int:
        if len(tokens) > 60:
            may_continue.wait(30)
        return ord("x")

    served = serve(reply, parallel=1, waiting=0, n_ctx=8192)
    with (
        client(served) as api,
        api.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, max_tokens=200
        ) as stream,
    ):
        next(iter(stream))
        try:
            status, headers, found = post(served, json.dumps({"messages": HELLO}).encode())
        finally:
            may_continue.set()
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert found["error"]["code"] == "busy"


def test_a_bug_gets_status_500_and_the_server_continues(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    monkeypatch.setattr("llmcli.api.forms.conversation_form.to_conversation", lambda *_: 1 // 0)
    status, _, found = post(served, json.dumps({"messages": HELLO}).encode())
    assert (status, found["error"]["type"]) == (500, "server_error")
    assert post(served, b"", "/health", "GET")[0] == 200
    assert "ZeroDivisionError" in caplog.text


def test_a_bug_in_a_call_on_the_engines_thread_fails_only_this_call(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    monkeypatch.setattr(
        "llmcli.serve.http.routes.kv.measure_cache_usage", lambda ledger: {}["secret"]
    )
    status, _, found = post(served, b"", "/v1/kv", "GET")
    assert (status, found["error"]["message"]) == (500, "internal error; see the server's log")
    assert client(served).chat.completions.create(model="tiny", messages=HELLO)
    assert "KeyError" in caplog.text


def test_a_bug_in_a_stream_ends_it_with_an_error(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()

    def fail(form: ChatForm, answers: object) -> None:
        raise LookupError("secret")

    monkeypatch.setattr(ChatForm, "stream_end", fail)
    with client(served) as api, pytest.raises(openai.APIError, match="see the server's log"):
        list(api.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert "LookupError: secret" in caplog.text
    assert client(served).chat.completions.create(model="tiny", messages=HELLO)


def test_a_failed_answer_does_not_affect_others(serve: Callable[..., Served]) -> None:
    context = FakeContext(n_ctx=512, n_seq_max=4)
    logits = context._logits
    context._logits = lambda tokens: logits(tokens) * float("nan" if 120 in tokens else "1")  # type: ignore[method-assign]
    with client(serve(context=context)) as api:
        with pytest.raises(openai.InternalServerError, match="NaN"):
            api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        assert (
            api.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
            == "hello"
        )


def test_an_unsatisfiable_grammar_gets_status_400(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_when_accepting(self: GrammarMatcher) -> None:
        if self.is_accepting:
            raise UnsatisfiableConstraint(
                "the grammar cannot be followed any further", hint="simplify it"
            )

    served = serve()
    monkeypatch.setattr(GrammarMatcher, "_check", fail_when_accepting)
    body: Any = {
        "model": "tiny",
        "messages": HELLO,
        "extra_body": {"grammar": 'root ::= "ab" [a-z]*'},
    }
    with client(served) as api:
        with pytest.raises(openai.BadRequestError, match="any further"):
            api.chat.completions.create(**body)
        with pytest.raises(openai.APIError, match="any further") as caught:
            list(api.chat.completions.create(**body, stream=True))
        assert caught.value.type == "invalid_request_error"  # in a stream that had begun
        assert (
            api.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
            == "hello"
        )


def test_an_allowed_origin_gets_cors_headers(serve: Callable[..., Served]) -> None:
    api = {"origin": "https://a.example", "access-control-request-method": "POST"}
    status, headers, _ = post(
        serve(cors=("https://a.example",)), b"", "/v1/models", "OPTIONS", **api
    )
    assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert "access-control-allow-origin" not in post(serve(), b"", "/v1/models", "GET", **api)[1]
