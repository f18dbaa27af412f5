"""The client against servers with valid and invalid answers."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.bench.load.client import LoadTarget, open_client, parse_base_url
from llmcli.bench.load.records import LoadAnswer, LoadJob
from llmcli.errors import UserError
from tests.fixtures.load_server import Scripted, counted, plain, streamed, text

JOB = LoadJob("tell me", 8)
Servers = Callable[..., Scripted]


def asked(server: LoadTarget, job: LoadJob = JOB, count: int = 1) -> list[LoadAnswer]:
    async def all_of_them() -> list[LoadAnswer]:
        async with open_client(server) as client:
            answers = [LoadAnswer(0.0) for _ in range(count)]
            for answer in answers:
                await client.send(job, answer)
            return answers

    return asyncio.run(all_of_them())


def test_tokens_are_what_the_server_counted_not_the_chunks(scripted: Servers) -> None:
    made = scripted(
        streamed(
            text(""),
            "a",
            "b c",
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            counted(20, 5, 12),
        )
    )
    (one,) = asked(LoadTarget(made.url + "/v1", "m"))
    assert (one.is_complete, one.tokens, one.token_counts, one.finish_reason) == (
        True,
        5,
        [1, 1],
        "length",
    )
    assert (one.prompt_tokens, one.cached_tokens) == (20, 12)
    assert one.sent <= one.arrival_times[0] <= one.arrival_times[1] <= (one.ended or 0)


def test_what_is_sent_is_openais(scripted: Servers) -> None:
    made = scripted(streamed("a"))
    server = LoadTarget(made.url + "/v1", "m", "secret", extra_fields={"temperature": 0})
    asked(server, replace(JOB, shared="be short"))
    asked(replace(server, chat=False), replace(JOB, shared="be short"))
    chat, completion = made.bodies
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
    assert made.heads[0].startswith("POST /v1/chat/completions ")
    assert made.heads[1].startswith("POST /v1/completions ")
    assert "Authorization: Bearer secret" in made.heads[0]


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
def test_what_goes_wrong_is_an_error_of_its_kind(
    scripted: Servers, reply: bytes, kind: str, says: str
) -> None:
    made = scripted(reply)
    (one,) = asked(LoadTarget(made.url + "/v1", "m"))
    assert (one.is_complete, one.error) == (False, kind)
    assert one.error_message.startswith(says)
    assert one.ended is not None


def test_a_server_that_is_not_there_or_says_nothing_in_time(scripted: Servers) -> None:
    made = scripted(streamed("a"))
    gone = LoadTarget("http://127.0.0.1:1/v1", "m")
    assert asked(gone)[0].error == "no connection"
    assert asked(LoadTarget(made.url + "/v1", "m", timeout_seconds=0.0))[0].error == "timeout"


def test_a_kept_connection_that_the_server_closed_costs_no_request(scripted: Servers) -> None:
    made = scripted(streamed("a"))  # each connection ends with its answer
    assert [one.error for one in asked(LoadTarget(made.url + "/v1", "m"), count=5)] == [None] * 5


@pytest.mark.parametrize(("after", "stamps"), [(0, 0), (2, 3)])
def test_a_client_may_go_away(scripted: Servers, after: int, stamps: int) -> None:
    made = scripted(streamed("a", "b", "c", counted(9, 3), done=False))
    (one,) = asked(LoadTarget(made.url + "/v1", "m"), replace(JOB, cancel_after=after))
    assert (one.cancelled, one.is_complete, one.error, len(one.arrival_times)) == (
        True,
        False,
        None,
        stamps,
    )


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("http://h:8080", "http://h:8080/v1"),
        ("http://h:8080/v1/", "http://h:8080/v1"),
        ("https://h/api/v1/chat/completions", "https://h/api/v1"),
    ],
)
def test_an_address_is_taken_as_people_type_it(typed: str, base: str) -> None:
    assert parse_base_url(typed) == base


@pytest.mark.parametrize("typed", ["ftp://h", "http://", "http://h:99999", "http://[::1"])
def test_what_is_no_address_is_refused(typed: str) -> None:
    with pytest.raises(UserError, match="is not a server address"):
        parse_base_url(typed)
