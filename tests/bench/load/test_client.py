"""The client of load tests against servers with valid and invalid answers."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.bench.load.client import LoadTarget, open_client
from llmcli.bench.load.records import LoadAnswer, LoadJob
from tests.fixtures.load_server import Scripted, counted, plain, streamed, text

JOB = LoadJob("tell me", 8)
Servers = Callable[..., Scripted]


def send_jobs(server: LoadTarget, job: LoadJob = JOB, count: int = 1) -> list[LoadAnswer]:
    async def send_all() -> list[LoadAnswer]:
        async with open_client(server) as client:
            answers = [LoadAnswer(0.0) for _ in range(count)]
            for answer in answers:
                await client.send(job, answer)
            return answers

    return asyncio.run(send_all())


def test_the_servers_token_count_has_priority_over_the_chunks(scripted: Servers) -> None:
    server = scripted(
        streamed(
            text(""),
            "a",
            "b c",
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            counted(20, 5, 12),
        )
    )
    (answer,) = send_jobs(LoadTarget(server.url + "/v1", "m"))
    assert (answer.is_complete, answer.tokens, answer.token_counts, answer.finish_reason) == (
        True,
        5,
        [1, 1],
        "length",
    )
    assert (answer.prompt_tokens, answer.cached_tokens) == (20, 12)
    assert answer.sent <= answer.arrival_times[0] <= answer.arrival_times[1] <= (answer.ended or 0)


def test_request_bodies_follow_openais_api(scripted: Servers) -> None:
    server = scripted(streamed("a"))
    target = LoadTarget(server.url + "/v1", "m", "secret", extra_fields={"temperature": 0})
    send_jobs(target, replace(JOB, shared="be short"))
    send_jobs(replace(target, chat=False), replace(JOB, shared="be short"))
    chat, completion = server.bodies
    assert chat == {
        "model": "m",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "tell me"},
        ],
    }
    assert completion["prompt"] == "be short\ntell me"
    assert server.heads[0].startswith("POST /v1/chat/completions ")
    assert server.heads[1].startswith("POST /v1/completions ")
    assert "Authorization: Bearer secret" in server.heads[0]


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (plain({"error": {"message": "busy"}}, "429 Too Many"), "http 429", "busy"),
        (plain({}, "500 Oh"), "http 500", "{}"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://h.invalid/\r\nContent-Length: 0\r\n\r\n",
            "http 302",
            "",
        ),
        (streamed("a", {"error": {"message": "cache full"}}), "error in the stream", "cache full"),
        (streamed("a", done=False), "broken off", ""),
        (streamed(text("")), "no text", ""),
        (
            streamed("a").replace(b'"choices"', b"choices"),
            "bad stream",
            "the stream contains invalid JSON",
        ),
        (b"", "broken off", "Server disconnected"),
        (b"nonsense\r\n\r\n", "broken off", ""),
    ],
)
def test_each_failure_has_its_kind_of_error(
    scripted: Servers, reply: bytes, kind: str, says: str
) -> None:
    server = scripted(reply)
    (answer,) = send_jobs(LoadTarget(server.url + "/v1", "m"))
    assert (answer.is_complete, answer.error) == (False, kind)
    assert answer.error_message.startswith(says)
    assert answer.ended is not None


def test_a_missing_or_silent_server_is_an_error(scripted: Servers) -> None:
    server = scripted(streamed("a"))
    gone = LoadTarget("http://127.0.0.1:1/v1", "m")
    assert send_jobs(gone)[0].error == "no connection"
    assert send_jobs(LoadTarget(server.url + "/v1", "m", timeout_seconds=0.0))[0].error == "timeout"


def test_a_closed_keep_alive_connection_fails_no_request(scripted: Servers) -> None:
    server = scripted(streamed("a"))  # each connection ends with its answer
    assert [answer.error for answer in send_jobs(LoadTarget(server.url + "/v1", "m"), count=5)] == [
        None
    ] * 5


@pytest.mark.parametrize(("after", "stamps"), [(0, 0), (2, 3)])
def test_the_client_can_cancel_an_answer(scripted: Servers, after: int, stamps: int) -> None:
    server = scripted(streamed("a", "b", "c", counted(9, 3), done=False))
    (answer,) = send_jobs(LoadTarget(server.url + "/v1", "m"), replace(JOB, cancel_after=after))
    assert (answer.cancelled, answer.is_complete, answer.error, len(answer.arrival_times)) == (
        True,
        False,
        None,
        stamps,
    )
