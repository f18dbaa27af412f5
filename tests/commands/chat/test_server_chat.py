"""`llmcli chat --server` as its users drive it: with a server of scripted answers, and llmcli's."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.chat.conversation import saved_chats
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.tool_steps import CallRecord, ToolStep
from llmcli.chat.server import answer_stream
from llmcli.http_client import background_client
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.cli import Done
from tests.fixtures.load_server import Scripted, counted, plain, streamed, text
from tests.fixtures.server import Served

Llmcli = Callable[..., Done]
Servers = Callable[..., Scripted]
END = text("", finish_reason="stop")
HELLO = streamed("Hel", "lo", END, counted(12, 7, 5))


def listing(*names: str, owner: str = "", **more: Any) -> bytes:
    """Return the list of models of a server."""
    return plain({"data": [{"id": name, "owned_by": owner, **more} for name in names]})


def thinking(words: str, field: str = "reasoning_content") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {field: words}}]}


def contents(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_a_conversation_is_sent_and_the_times_are_of_chunks(
    llmcli: Llmcli, scripted: Servers
) -> None:
    server = scripted(HELLO)
    words = ["chat", "--server", server.url, "-sys", "Be kind.", "-n", "9", "-r", "END"]
    done = llmcli(*words, stdin=b"one\ntwo\n/timing\n/stats\n")
    assert (done.code, done.out.splitlines()[:2]) == (0, ["Hello", "Hello"])
    first, second = server.bodies
    assert contents(first) == [("system", "Be kind."), ("user", "one")]
    assert contents(second) == [
        *contents(first),
        ("assistant", "Hello"),
        ("user", "two"),
    ]
    assert (first["model"], first["max_tokens"], first["stop"]) == ("scripted", 9, ["END"])
    assert first["stream_options"] == {"include_usage": True}
    assert "temperature" not in first  # what the user has not set is the server's
    timing = done.err.splitlines()[0]
    assert timing.startswith("[ttft ")
    assert "prompt 12 tok (5 cached) · 7 tok" in timing
    assert "2 chunks p50" in timing
    assert "#  chunk" in done.out
    assert "generated tokens  14" in done.out
    assert "24: 10 reused" in done.out


def test_branches_sessions_and_export(llmcli: Llmcli, scripted: Servers, home: Path) -> None:
    server = scripted(HELLO, streamed("Bye", END), streamed("Sea", END), streamed("Lake", END))
    lines = "one\n/regen\n/edit 1 other\n/switch main\n/tree\n/save kept\n/export md\n/undo\n"
    done = llmcli("chat", "--server", server.url, stdin=lines.encode())
    assert done.code == 0
    assert [contents(body) for body in server.bodies] == [
        [("user", "one")],
        [("user", "one")],
        [("user", "other")],
    ]
    assert "edit-1" in done.out
    assert "without a KV state" in done.out
    assert "## Assistant\n\nBye" in done.out
    again = llmcli("chat", "--server", server.url, "--resume", "kept", stdin=b"more\n")
    assert again.code == 0
    assert contents(server.bodies[-1]) == [("user", "one"), ("assistant", "Bye"), ("user", "more")]
    # without --server, the model is not looked for on the hub
    for name in ("kept", "last"):
        refused = llmcli("chat", "--resume", name, stdin=b"more\n")
        assert refused.code == 1
        assert f"used scripted of the server {server.url}/v1" in refused.err
        assert f"--server {server.url}/v1 --resume" in refused.err
    log = max((home / "state" / "sessions").iterdir(), key=lambda file: file.stat().st_mtime)
    record = json.loads(log.read_text().splitlines()[-1])
    assert record["model"] == {"name": "scripted", "server": f"{server.url}/v1"}
    assert (record["timing"]["chunks"], record["timing"]["generated_tokens"]) == (1, 1)
    # the log still has the server after /load has replaced the conversation
    llmcli("chat", "--server", server.url, stdin=b"one\n/load kept\n")
    refused = llmcli("chat", "--resume", "last", stdin=b"more\n")
    assert f"used scripted of the server {server.url}/v1" in refused.err


def test_calls_of_a_resumed_chat_are_sent_with_their_results(
    llmcli: Llmcli, scripted: Servers, home: Path
) -> None:
    server, conversation = scripted(HELLO), Conversation(default_sampling())
    call = CallRecord("c1", "add", '{"a": 2}', "5")
    conversation.add_turn("sum?", "It is 5.", "stop", steps=(ToolStep("", "", (call,)),))
    saved_chats.save_chat(conversation, config.load_config(), "sums", "scripted")
    done = llmcli("chat", "--server", server.url, "--resume", "sums", stdin=b"more\n")
    assert done.code == 0, done.err
    function = {"name": "add", "arguments": '{"a": 2}'}
    assert server.bodies[-1]["messages"] == [
        {"role": "user", "content": "sum?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "It is 5."},
        {"role": "user", "content": "more"},
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_of_a_field_of_its_own_is_shown_and_not_sent_again(
    llmcli: Llmcli, scripted: Servers, field: str
) -> None:
    server = scripted(streamed(thinking("Hm", field), thinking("m.", field), "Yes", END))
    server.models = listing("m", owner="vllm")
    done = llmcli(
        "chat", "--server", server.url, "--hidethinking", stdin=b"a?\n/think\n/think off\nb?\n"
    )
    assert done.out == "Yes\n<think>Hmm.</think>\nreasoning = off\nYes\n"
    assert contents(server.bodies[1])[1] == ("assistant", "Yes")
    assert "chat_template_kwargs" not in server.bodies[0]
    assert server.bodies[1]["chat_template_kwargs"] == {"enable_thinking": False}
    shown = llmcli("chat", "--server", server.url, stdin=b"a?\n")
    assert shown.out == "<think>Hmm.</think>\n\nYes\n"


@pytest.mark.parametrize(
    ("owner", "sent", "err"),
    [
        (
            "vllm",
            {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "ignore_eos": True},
            "",
        ),
        (
            "llamacpp",
            {"temperature": 0.5, "top_k": 7, "repeat_penalty": 1.5, "ignore_eos": True},
            "",
        ),
        (
            "acme",
            {"temperature": 0.5, "top_k": 7, "repeat_penalty": 1.5, "ignore_eos": True},
            "may ignore: repeat_penalty, top_k, ignore_eos",
        ),
        ("openai", None, "--top-k has no effect here: OpenAI does not have it"),
    ],
)
def test_settings_are_sent_under_the_names_of_the_server(
    llmcli: Llmcli, scripted: Servers, owner: str, sent: dict[str, Any] | None, err: str
) -> None:
    server = scripted(HELLO)
    server.models = listing("m", owner=owner)
    flags = ["--temp", "0.5", "--top-k", "7", "--repeat-penalty", "1.5", "--ignore-eos"]
    done = llmcli("chat", "--server", server.url, *flags, stdin=b"a?\n")
    assert err in done.err
    assert done.code == (0 if sent else 1)
    expected = {"model", "messages", "stream", "stream_options"}
    names = set(server.bodies[0]) - expected if server.bodies else set()
    assert names == set(sent or {})
    assert all(server.bodies[0][name] == value for name, value in (sent or {}).items())


def test_a_budget_for_thinking_is_sent_only_to_servers_that_have_it(
    llmcli: Llmcli, scripted: Servers
) -> None:
    server = scripted(HELLO)
    words = ["chat", "--server", server.url]
    server.models = listing("m", owner="llmcli")
    lines = b"a?\n/set budget 5\nb?\n/set budget -1\nc?\n"
    assert llmcli(*words, "--reasoning-budget", "9", stdin=lines).code == 0
    sent = [body.get("reasoning") for body in server.bodies]
    assert sent == [{"max_tokens": 9}, {"max_tokens": 5}, None]
    server.models = listing("m", owner="vllm")
    refused = llmcli(*words, "--reasoning-budget", "9", stdin=b"a?\n")
    assert (refused.code, len(server.bodies)) == (1, 3)
    assert "--reasoning-budget has no effect here: vLLM has no field for it" in refused.err
    done = llmcli(*words, stdin=b"/set thinking_budget 9\n/set\na?\n")
    assert "thinking_budget cannot be changed here: vLLM has no field for it" in done.err
    assert "reasoning_budget" not in done.out
    assert "reasoning" not in server.bodies[-1]


def test_a_default_that_the_user_sets_is_sent(llmcli: Llmcli, scripted: Servers) -> None:
    server = scripted(HELLO)
    done = llmcli(
        "chat", "--server", server.url, stdin=b"/set temp 0.8\n/set top_p\n/set seed 3\na?\n"
    )
    assert "the server's" in done.out
    body = server.bodies[0]
    assert (body["temperature"], body["seed"], body.get("top_p")) == (0.8, 3, None)


def test_answers_of_a_form(llmcli: Llmcli, scripted: Servers) -> None:
    server = scripted(streamed('{"a"', END))
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    done = llmcli("chat", "--server", server.url, "-j", schema, stdin=b"a?\n")
    response_format = server.bodies[0]["response_format"]
    assert response_format["json_schema"]["schema"] == json.loads(schema)
    assert "the JSON document is incomplete" in done.err
    server.models = listing("m", owner="sglang")
    refused = llmcli("chat", "--server", server.url, "--grammar", 'root ::= "a"', stdin=b"a?\n")
    assert (refused.code, "SGLang takes no GBNF grammar" in refused.err) == (1, True)
    server.models = listing("m", owner="llamacpp")
    llmcli("chat", "--server", server.url, "--grammar", 'root ::= "a"', stdin=b"a?\n")
    assert server.bodies[-1]["grammar"] == 'root ::= "a"'


def test_probabilities_come_from_the_server(llmcli: Llmcli, scripted: Servers) -> None:
    entries = [
        {"token": "He", "logprob": -0.5, "top_logprobs": [{"token": "Oh", "logprob": -0.25}]},
        {"token": "y", "logprob": -1.0, "top_logprobs": []},
    ]
    server = scripted(streamed(text("Hey", logprobs={"content": entries}), END))
    done = llmcli("chat", "--server", server.url, stdin=b"/probs on\na?\n/probs\n/probs 1\n")
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 10)
    assert "60.7%" in done.out  # exp(-0.5)
    assert "77.88%" in done.out  # exp(-0.25)
    assert "perplexity 2.117" in done.out  # exp((0.5 + 1) / 2)


def test_the_model_is_chosen_from_the_list(llmcli: Llmcli, scripted: Servers) -> None:
    server = scripted(HELLO)
    server.models = listing("small", "large", max_model_len=4096)
    several = llmcli("chat", "--server", server.url, stdin=b"a?\n")
    assert several.code == 1
    assert "has 2 models" in several.err
    assert "--model NAME: small, large" in several.err
    words = ["chat", "--server", server.url, "--model"]
    done = llmcli(*words, "small", stdin=b"a?\n/model huge\n/model large\nb?\n/model\n")
    assert [body["model"] for body in server.bodies] == ["small", "large"]
    assert "has no model called huge" in done.err
    assert "large · " in done.out
    assert "4,096 tokens of context" in done.out
    assert f"large ({server.url}/v1)" in done.out
    unlisted = llmcli(*words, "smal", stdin=b"a?\n")
    assert "warning: the server does not list smal; it has small" in unlisted.err
    server.models = plain({"data": []})
    assert "lists no model" in llmcli("chat", "--server", server.url, stdin=b"a?\n").err
    server.models = plain({}, "404 Not Found")
    assert llmcli(*words, "any", stdin=b"a?\n").out == "Hello\n"


def test_the_key_comes_from_an_option_a_file_or_the_environment(
    llmcli: Llmcli, scripted: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, file = scripted(HELLO), tmp_path / "key"
    file.write_text("filed\n")
    monkeypatch.setenv("LLMCLI_API_KEY", "environment")
    for words, key in (
        ([], "environment"),
        (["--api-key", "typed"], "typed"),
        (["--api-key-file", str(file)], "filed"),
    ):
        assert llmcli("chat", "--server", server.url, *words, stdin=b"a?\n").code == 0
        assert f"Authorization: Bearer {key}\r\n" in server.heads[-1]
        assert f"Authorization: Bearer {key}\r\n" in server.model_heads[-1]
    assert "no key has" in llmcli("chat", "--server", server.url, "--api-key", "a\nb").err
    server.models = plain({"error": {"message": "bad key"}}, "401 Unauthorized")
    done = llmcli("chat", "--server", server.url, "--model", "m", stdin=b"a?\n")
    assert done.code == 1
    assert "answers 401: bad key\nhint: --api-key-file" in done.err
    assert "environment" not in done.err


@pytest.mark.parametrize(
    ("reply", "message", "kept"),
    [
        (plain({"error": {"message": "no model x"}}, "404 Not Found"), "404: no model x", ""),
        (plain({"error": "busy"}, "429 Too Many"), "429: busy", ""),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://h.invalid/\r\nContent-Length: 0\r\n\r\n",
            "302: it redirects to http://h.invalid/",
            "",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>hi", "is not an event stream: '<html>hi'", ""),
        (b"HTTP/1.1 200 OK\r\n\r\n", "ended the stream before the answer was complete", ""),
        (b"\x00\x01garbage\r\n\r\n", "", ""),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {\n\n", "invalid JSON", ""),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [1]\n\n", "not an object", ""),
        (streamed({"error": {"message": "out of memory"}}), "out of memory", ""),
        (streamed("Hel", done=False), "ended the stream before the answer was complete", "Hel"),
        (streamed("Hel", {"error": {"message": "crash"}}), "crash", "Hel"),
        (streamed("Hel", done=False) + b"data: nonsense\n\n", "invalid JSON", "Hel"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"
            + streamed("Hel", done=False).partition(b"\r\n\r\n")[2],
            "",
            "Hel",
        ),
    ],
)
def test_a_failed_answer_is_one_error_and_its_text_is_kept(
    llmcli: Llmcli, scripted: Servers, reply: bytes, message: str, kept: str
) -> None:
    server = scripted(reply, HELLO)
    done = llmcli("chat", "--server", server.url, "--model", "m", stdin=b"a?\n/export json\nb?\n")
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.err
    before = [("user", "a?"), ("assistant", kept)] if kept else []
    assert contents(server.bodies[-1]) == [*before, ("user", "b?")]
    assert ('"cut": true' in done.out) == bool(kept)
    assert done.out.endswith("Hello\n")


ODD_CHUNKS: list[Any] = [
    {"choices": []},
    {"choices": None, "usage": None},
    {"choices": [None], "usage": {"completion_tokens": -4, "prompt_tokens": "x"}},
    {"choices": [{"delta": "text", "finish_reason": 7, "logprobs": [1]}]},
    {"choices": [{"delta": {"content": 7, "reasoning": ["x"]}}]},
    {"choices": {"0": 1}},
    text("a\x00\x1b[31mb\ud800"),
    text("c", logprobs={"content": [{"token": "c", "logprob": "NaN"}, None]}),
    END,
    {"choices": [], "usage": None},
]


def test_chunks_with_wrong_types_are_read_as_far_as_they_are_right(
    llmcli: Llmcli, scripted: Servers
) -> None:
    server = scripted(streamed(*ODD_CHUNKS))
    done = llmcli("chat", "--server", server.url, stdin=b"/probs on\na?\nb?\n")
    assert done.code == 0
    assert "a␀␛[31mb?c" in done.out
    assert "\x1b" not in done.out + done.err
    assert "tokens not counted by the server" in done.err
    assert contents(server.bodies[1])[1] == ("assistant", "a\x00\x1b[31mb?c")


def test_a_body_without_a_stream_is_an_answer(llmcli: Llmcli, scripted: Servers) -> None:
    message = {"choices": [{"message": {"content": "Hey"}, "finish_reason": "length"}]}
    done = llmcli("chat", "--server", scripted(plain(message)).url, stdin=b"a?\n")
    assert (done.code, done.out) == (0, "Hey\n")
    assert "(stopped at the token limit)" in done.err


@pytest.mark.parametrize("limit", ["characters", "bytes", "event", "silence"])
def test_an_answer_without_an_end_is_broken_off(
    llmcli: Llmcli, scripted: Servers, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    reply = streamed(*["x" * 50] * 50, done=False)
    message = "the answer has more than 100 characters"
    if limit == "characters":
        monkeypatch.setattr(answer_stream, "MAX_ANSWER_CHARS", 100)
    elif limit == "bytes":
        monkeypatch.setattr(background_client, "MAX_STREAM_BYTES", 1000)
        message = "the answer does not end"
    elif limit == "silence":
        monkeypatch.setattr(background_client, "IDLE_SECONDS", 0.2)
        message = "the server sent nothing"
    else:
        reply = streamed("x", done=False) + b"data: " + b"y" * (5 << 20)
        message = "an event of the stream does not end"
    server = scripted(reply)
    server.holds = True
    done = llmcli("chat", "--server", server.url, stdin=b"a?\n")
    assert done.code == 1
    assert message in done.err
    assert done.out.startswith("x")
    assert server.client_left.wait(30)


def test_a_server_that_is_not_there_is_one_error(llmcli: Llmcli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = llmcli("chat", "--server", f"http://127.0.0.1:{port}", stdin=b"a?\n")
    assert done.code == 1
    assert done.err.startswith(f"error: http://127.0.0.1:{port}/v1: ")
    assert "hint: is the server running?" in done.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--server", "localhost:8080"], 1, "is not a server address"),
        (["--server", "http://h.invalid", "--offline"], 1, "no connection to http://h.invalid"),
        (["--server", "http://h", "-c", "512"], 2, "--ctx-size configures a model in this process"),
        (["--server", "http://h", "--beams", "2"], 2, "--beams configures"),
        (["--server", "http://h", "--on-full", "shift"], 2, "--on-full configures"),
        (["--server", "http://h", "--chat-template", "x"], 2, "--chat-template configures"),
        (["--server", "http://h", "--mcp", "x"], 2, "leave out --mcp, or chat without --server"),
        (["--server", "http://h", "--tool-rounds", "3"], 2, "leave out --tool-rounds, or"),
        (["--server", "http://h", "--allow-tool", "x"], 2, "tools are called only by a model in"),
        (["--api-key", "x"], 2, "--api-key applies to --server"),
        (["--insecure"], 2, "--insecure applies to --server"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    llmcli: Llmcli, words: list[str], code: int, message: str
) -> None:
    done = llmcli("chat", *words, stdin=b"a?\n")
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_what_needs_the_model_in_this_process_says_so(
    llmcli: Llmcli, scripted: Servers, tmp_path: Path
) -> None:
    server, file = scripted(HELLO), tmp_path / "notes.txt"
    file.write_text("The ferry leaves at nine.")
    commands = ["/kv", "/bench", "/beams", "/context", "/context drop 1", "/show info"]
    commands += ["/show template", "/set ctx_size 4", "/tools"]
    done = llmcli("chat", "--server", server.url, stdin="\n".join(["a?", *commands]).encode())
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    needed = f"this needs the model in this process, and the chat uses the server {server.url}/v1"
    assert errors == [f"error: {needed}"] * len(commands)
    settings = [b"/set beams 2", b"/set on_full shift", b"/set ngram_draft off", b"/set endless on"]
    done = llmcli("chat", "--server", server.url, stdin=b"\n".join(settings))
    assert done.err.count("cannot be changed here: it belongs to a model in this process") == 4
    done = llmcli("chat", "--server", server.url, stdin=f"/read {file} When?\n/show\n".encode())
    assert contents(server.bodies[-1]) == [
        ("user", "--- File: notes.txt ---\nThe ferry leaves at nine.\nWhen?")
    ]
    assert f"server          {server.url}/v1" in done.out


def test_a_chat_with_a_server_of_llmcli(
    llmcli: Llmcli, serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(b"hello", keys=("secret",))
    refused = llmcli("chat", "--server", served.url, stdin=b"a?\n")
    assert "answers 401" in refused.err
    words = ["chat", "--server", served.url, "--api-key", "secret", "--temp", "0"]
    done = llmcli(*words, "--logprobs", "2", stdin=b"a?\nb?\n/model\n/probs 1\n")
    assert done.code == 0
    assert done.out.startswith("hello\nhello\ntiny (")
    assert "<- taken" in done.out
    assert "5 tok" in done.err
