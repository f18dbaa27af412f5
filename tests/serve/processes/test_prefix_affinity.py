"""Prompts with the same beginning have one key, and a key has one replica while others change."""

import json

from llmcli.serve.processes.prefix_affinity import PREFIX_CHARACTERS, prefix_key, rank_replicas


def chat(*said: tuple[str, object]) -> bytes:
    return prefix_key(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}).encode()
    )


def test_a_system_text_is_the_key() -> None:
    assert chat(("system", "be brief"), ("user", "one")) == chat(
        ("system", "be brief"), ("user", "two")
    )
    assert chat(("system", "be brief")) != chat(("system", "be long"))
    told = (
        b'{"instructions": "be brief", "input": "one"}',
        b'{"instructions": "be brief", "input": []}',
    )
    assert prefix_key(told[0]) == prefix_key(told[1])
    blocks = [{"type": "text", "text": "be brief"}]
    for system in ("be brief", blocks):
        one, other = (
            {"system": system, "messages": [{"role": "user", "content": text}]} for text in "ab"
        )
        assert prefix_key(json.dumps(one).encode()) == prefix_key(json.dumps(other).encode()) != b""
    assert chat(("user", [{"type": "text", "text": "one"}])) != chat(
        ("user", [{"type": "text", "text": "two"}])
    )


def test_a_prompt_counts_by_its_beginning() -> None:
    begin = "x" * PREFIX_CHARACTERS
    assert prefix_key(json.dumps({"prompt": begin + "a"}).encode()) == prefix_key(
        json.dumps({"prompt": begin + "b"}).encode()
    )
    assert prefix_key(b'{"prompt": "a"}') != prefix_key(b'{"prompt": "b"}')


def test_what_has_no_beginning_has_no_key() -> None:
    for body in (
        b"",
        b"{",
        b"[1]",
        b"{}",
        b'{"prompt": null}',
        b'{"messages": []}',
        b"\xff",
        b"[" * 100_000,
    ):
        assert prefix_key(body) == b"", body


def test_one_that_leaves_moves_its_own_keys_alone() -> None:
    names = [f"replica {n}" for n in range(5)]
    keys = [bytes([n, n + 1]) for n in range(200)]
    first = {key: rank_replicas(key, names)[0] for key in keys}
    assert {*first.values()} == {*names}
    left = names[1:]
    for key in keys:
        assert rank_replicas(key, left)[0] == (
            first[key] if first[key] in left else rank_replicas(key, names)[1]
        )
        assert rank_replicas(key, reversed(names)) == rank_replicas(key, names)
