"""run --json --logprobs N and chat --logprobs N."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.commands.conftest import Done

Llmcli = Callable[..., Done]
Fake = Callable[..., Any]


@pytest.mark.parametrize(("words", "count"), [(["--logprobs"], 10), (["--logprobs", "3"], 3), (["--logprobs=2"], 2)])
def test_logprobs_keeps_the_likeliest_of_each_step(words: list[str], count: int, llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    for place in (["run", "fake", *words, "--json", "x"], ["run", "fake", "x", "--json", *words]):
        tokens = json.loads(llmcli(*place, "--temp", "0").out)["tokens"]
        assert [len(token["top_logprobs"]) for token in tokens] == [count] * 3
        for token in tokens:
            likeliest = token["top_logprobs"]
            assert likeliest[0] == {"id": token["id"], "text": token["text"], "logprob": token["logprob"]}
            assert sorted((one["logprob"] for one in likeliest), reverse=True) == [one["logprob"] for one in likeliest]


def test_without_logprobs_there_are_no_alternatives(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    assert "top_logprobs" not in json.loads(llmcli("run", "fake", "x", "--json").out)["tokens"][0]


def test_samples_have_alternatives_too(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    document = json.loads(llmcli("run", "fake", "x", "--json", "--samples", "2", "--logprobs", "4").out)
    assert [len(t["top_logprobs"]) for one in document["samples"] for t in one["tokens"]] == [4] * 6


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["run", "fake", "x", "--logprobs"], 2, "--json"),
        (["run", "fake", "x", "--json", "--logprobs", "101"], 1, "from 0 to 100"),
        (["run", "fake", "x", "--json", "--logprobs", "-1"], 1, "from 0 to 100"),
        (["run", "fake", "--json", "--", "--logprobs"], 0, "yes"),
    ],
)
def test_logprobs_says_what_it_takes(words: list[str], code: int, what: str, llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    done = llmcli(*words)
    assert done.code == code
    assert what in done.out + done.err


def test_a_chat_begun_with_logprobs_shows_them(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    done = llmcli("chat", "fake", "--logprobs", "2", stdin=b"a?\n/probs 1\n")
    assert done.code == 0
    assert "<- taken" in done.out
