"""Display flags: --logprobs, --hidethinking, --reasoning."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
Fake = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "count"), [(["--logprobs"], 10), (["--logprobs", "3"], 3), (["--logprobs=2"], 2)]
)
def test_logprobs_keeps_the_likeliest_of_each_step(
    words: list[str], count: int, llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"yes")
    for place in (["run", "fake", *words, "--json", "x"], ["run", "fake", "x", "--json", *words]):
        tokens = json.loads(llmcli(*place, "--temp", "0").out)["tokens"]
        assert [len(token["top_logprobs"]) for token in tokens] == [count] * 3
        for token in tokens:
            likeliest = token["top_logprobs"]
            assert likeliest[0] == {
                "id": token["id"],
                "text": token["text"],
                "logprob": token["logprob"],
            }
            assert sorted((one["logprob"] for one in likeliest), reverse=True) == [
                one["logprob"] for one in likeliest
            ]


def test_without_logprobs_there_are_no_alternatives(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    assert "top_logprobs" not in json.loads(llmcli("run", "fake", "x", "--json").out)["tokens"][0]


def test_samples_have_alternatives_too(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    document = json.loads(
        llmcli("run", "fake", "x", "--json", "--samples", "2", "--logprobs", "4").out
    )
    assert [len(t["top_logprobs"]) for one in document["samples"] for t in one["tokens"]] == [4] * 6


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["run", "fake", "x", "--logprobs"], 2, "--json"),
        (["run", "fake", "x", "--json", "--logprobs", "101"], 1, "from 0 to 100"),
        (["run", "fake", "x", "--json", "--logprobs", "-1"], 1, "from 0 to 100"),
        (
            ["run", "fake", "x", "--json", "--logprobs", "--beams", "2"],
            2,
            "--logprobs is not available with --beams",
        ),
        (["run", "fake", "--json", "--", "--logprobs"], 0, "yes"),
    ],
)
def test_logprobs_says_what_it_takes(
    words: list[str], code: int, what: str, llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"yes")
    done = llmcli(*words)
    assert done.code == code
    assert what in done.out + done.err


def test_a_chat_begun_with_logprobs_shows_them(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    done = llmcli("chat", "fake", "--logprobs", "2", stdin=b"a?\n/probs 1\n")
    assert done.code == 0
    assert "<- taken" in done.out


def test_hidethinking_leaves_only_the_answer_in_a_pipe(llmcli: Llmcli, fake: Fake) -> None:
    text = "<think>Hm.</think>\n\nFour."
    fake(text.encode())
    assert llmcli("run", "fake", "x", "--temp", "0").out == text + "\n"
    assert llmcli("run", "fake", "x", "--temp", "0", "--hidethinking").out == "Four.\n"
    assert llmcli("chat", "fake", "--temp", "0", "--hidethinking", stdin=b"x\n").out == "Four.\n"
    document = json.loads(llmcli("run", "fake", "x", "--temp", "0", "--json", "--hidethinking").out)
    assert document["text"] == text  # programs get all of it, and its parts
    assert (document["thinking"], document["content"]) == ("<think>Hm.</think>", "Four.")


@pytest.mark.parametrize("spelling", ["-rea", "--reasoning", "--think"])
def test_reasoning_reaches_the_template(spelling: str, llmcli: Llmcli, fake: Fake) -> None:
    template = (
        "{{ messages[0].content }}{% if enable_thinking == false %}<think></think>{% endif %}"
    )
    opened = fake(b"yes", template=template)
    for mode, end in (("on", "x"), ("off", "x<think></think>"), ("auto", "x")):
        assert llmcli("run", "fake", "x", spelling, mode).code == 0
        held = bytes(token for token in opened[-1].engine.ledger.tokens[0] if token < 256)
        assert held.startswith(end.encode() + b"yes"[:1])


@pytest.mark.parametrize(
    ("mode", "what"), [("maybe", "one of: auto, on, off"), ("on", "--hidethinking")]
)
def test_reasoning_is_refused_where_it_means_nothing(
    mode: str, what: str, llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"yes")
    done = llmcli("run", "fake", "x", "--reasoning", mode)
    assert done.code == 1
    assert what in done.err


def test_markdown_changes_nothing_without_a_terminal(llmcli: Llmcli, fake: Fake) -> None:
    text = "# One\n**two**\n\n- three"
    fake(text.encode())
    assert llmcli("run", "fake", "x", "--temp", "0", "--markdown").out == text + "\n"
    assert (
        llmcli("chat", "fake", "--temp", "0", stdin=b"/set markdown on\nx\n").out
        == "markdown = on\n" + text + "\n"
    )
