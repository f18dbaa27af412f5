"""Prompts with the same beginning have the same key, and a key stays with its replica while other
replicas change.
"""

import asyncio
import json

from llmcli.serve.processes import front
from llmcli.serve.processes.prefix_affinity import PREFIX_CHARACTERS, prefix_key, rank_replicas


def chat(*messages: tuple[str, object]) -> bytes:
    return prefix_key({"messages": [{"role": role, "content": text} for role, text in messages]})


def test_the_key_is_made_from_the_system_text() -> None:
    assert chat(("system", "be brief"), ("user", "one")) == chat(
        ("system", "be brief"), ("user", "two")
    )
    assert chat(("system", "be brief")) != chat(("system", "be long"))
    bodies = [
        {"instructions": "be brief", "input": "one"},
        {"instructions": "be brief", "input": []},
    ]
    assert prefix_key(bodies[0]) == prefix_key(bodies[1])
    blocks = [{"type": "text", "text": "be brief"}]
    for system in ("be brief", blocks):
        first, second = (
            {"system": system, "messages": [{"role": "user", "content": text}]} for text in "ab"
        )
        assert prefix_key(first) == prefix_key(second) != b""
    assert chat(("user", [{"type": "text", "text": "one"}])) != chat(
        ("user", [{"type": "text", "text": "two"}])
    )


def test_the_key_of_a_prompt_depends_on_its_beginning() -> None:
    beginning = "x" * PREFIX_CHARACTERS
    assert prefix_key({"prompt": beginning + "a"}) == prefix_key({"prompt": beginning + "b"})
    assert prefix_key({"prompt": "a"}) != prefix_key({"prompt": "b"})


def test_a_body_without_a_prompt_has_no_key() -> None:
    for body in ({}, {"prompt": None}, {"messages": []}):
        assert prefix_key(body) == b"", body
    for raw in (b"", b"{", b"[1]", b"{}", b"\xff", b"[" * 100_000):
        assert asyncio.run(front.prefix_key_of_body(raw)) == b"", raw
    body = json.dumps({"prompt": "x" * 100_000})
    assert asyncio.run(front.prefix_key_of_body(body.encode())) == prefix_key(json.loads(body))


def test_removing_a_replica_moves_only_its_keys() -> None:
    names = [f"replica {n}" for n in range(5)]
    keys = [bytes([n, n + 1]) for n in range(200)]
    first = {key: rank_replicas(key, names)[0] for key in keys}
    assert {*first.values()} == {*names}
    remaining = names[1:]
    for key in keys:
        assert rank_replicas(key, remaining)[0] == (
            first[key] if first[key] in remaining else rank_replicas(key, names)[1]
        )
        assert rank_replicas(key, reversed(names)) == rank_replicas(key, names)
