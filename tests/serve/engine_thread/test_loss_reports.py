"""`/v1/kv` and the log say where a prompt leaves an earlier conversation, or why the common beginning
was not reused.
"""

import logging
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from tests.fixtures.server import Served

SYSTEM = {"role": "system", "content": "You are an agent that helps with a program."}
KEYS = "first-key", "second-key"


def chat(served: Served, *texts: str, key: str = "", **more: Any) -> dict[str, Any]:
    messages = [SYSTEM, *({"role": "user", "content": text} for text in texts)]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, **more}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{served.v1}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def losses(served: Served, key: str = "") -> list[dict[str, Any]]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{served.v1}/kv", headers=headers).json()["losses"]


def test_the_first_differing_token_is_told_with_its_place(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(n_ctx=2048)
    with caplog.at_level(logging.WARNING):
        chat(served, "Look at the file a.py")
        chat(served, "Look at the file b.py")
        (found,) = losses(served)
    prompt = f"<system>{SYSTEM['content']}\n<user>Look at the file "
    position = 1 + len(prompt)  # a BOS token comes first
    assert found.pop("time") > 0
    n_tokens = position + len("b.py\n<assistant>")
    assert found == {
        "request": 2,
        "conversation": 1,
        "slot": 0,
        "reason": "different",
        "prompt_tokens": n_tokens,
        "shared_tokens": position,
        "reused_tokens": position,
        "position": position,
        "token": "b",
        "cached_token": "a",
        "message": "message 2 (user)",
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"prefix lost: request 2 leaves conversation 1 (slot 0) at token {position}, message 2 (user):"
        f' "b" instead of "a"; {n_tokens - position} of {n_tokens} tokens are computed'
    ]


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_the_place_is_shown_for_the_conversations_of_other_routes(
    serve: Callable[..., Served], path: str
) -> None:
    served = serve(n_ctx=2048)
    for text in (f"{SYSTEM['content']} a.py", f"{SYSTEM['content']} b.py"):
        field = "input" if path == "responses" else "messages"
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {field: [{"role": "user", "content": text}], limit: 2}
        httpx.post(f"{served.v1}/{path}", json=body).raise_for_status()
    (found,) = losses(served)
    assert found["message"] == "message 1 (user)"


def test_a_prompt_that_continues_a_conversation_is_no_loss(serve: Callable[..., Served]) -> None:
    served = serve(n_ctx=2048)
    chat(served, "Look at the file a.py")
    chat(served, "Look at the file a.py")
    assert losses(served) == []


def test_dropped_cells_and_parameters_are_told(serve: Callable[..., Served]) -> None:
    served = serve(n_ctx=300)
    chat(served, "x" * 100)
    chat(served, "y" * 100)
    chat(served, "z" * 100)
    chat(served, "x" * 100)
    *_, found = losses(served)
    assert (found["reason"], found["conversation"], found["position"]) == ("dropped", 1, None)
    assert found["reused_tokens"] < found["shared_tokens"] == found["prompt_tokens"]
    body = {"model": "tiny", "prompt": "a text of many tokens", "max_tokens": 2}
    for more in ({}, {"echo": True, "logprobs": 1}):
        httpx.post(f"{served.v1}/completions", json=body | more)
    assert losses(served)[-1]["reason"] == "scored"


def test_a_client_sees_no_token_of_another_client(serve: Callable[..., Served]) -> None:
    served = serve(n_ctx=2048, keys=KEYS)
    chat(served, "first secret", key=KEYS[0])
    chat(served, "other secret", key=KEYS[1])
    texts = [
        [(found["token"], found["cached_token"]) for found in losses(served, key)] for key in KEYS
    ]
    assert texts == [[(None, "f")], [("o", None)]]


def test_the_latest_losses_are_kept(serve: Callable[..., Served]) -> None:
    served = serve(n_ctx=2048)
    for number in range(40):
        chat(served, f"{chr(65 + number)} is new")
    assert [found["request"] for found in losses(served)] == list(range(9, 41))
