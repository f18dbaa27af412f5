"""`llmcli run` and `llmcli chat` with --logprobs, --hidethinking, --reasoning and --markdown."""

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
def test_logprobs_returns_the_likeliest_tokens_of_each_step(
    words: list[str], count: int, llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"yes")
    for command_line in (
        ["run", "fake", *words, "--json", "x"],
        ["run", "fake", "x", "--json", *words],
    ):
        tokens = json.loads(llmcli(*command_line, "--temp", "0").out)["tokens"]
        assert [len(token["top_logprobs"]) for token in tokens] == [count] * 3
        for token in tokens:
            likeliest = token["top_logprobs"]
            assert likeliest[0] == {
                "id": token["id"],
                "text": token["text"],
                "logprob": token["logprob"],
            }
            assert sorted((candidate["logprob"] for candidate in likeliest), reverse=True) == [
                candidate["logprob"] for candidate in likeliest
            ]


def test_without_logprobs_there_are_no_top_logprobs(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    assert "top_logprobs" not in json.loads(llmcli("run", "fake", "x", "--json").out)["tokens"][0]


def test_every_sample_has_top_logprobs(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    document = json.loads(
        llmcli("run", "fake", "x", "--json", "--samples", "2", "--logprobs", "4").out
    )
    assert [
        len(token["top_logprobs"]) for sample in document["samples"] for token in sample["tokens"]
    ] == [4] * 6


@pytest.mark.parametrize(
    ("words", "code", "message"),
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
def test_invalid_uses_of_logprobs_are_errors(
    words: list[str], code: int, message: str, llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"yes")
    done = llmcli(*words)
    assert done.code == code
    assert message in done.out + done.err


def test_a_chat_with_logprobs_shows_them_with_probs(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"yes")
    done = llmcli("chat", "fake", "--logprobs", "2", stdin=b"a?\n/probs 1\n")
    assert done.code == 0
    assert "<- taken" in done.out


def test_hidethinking_prints_only_the_answer(llmcli: Llmcli, fake: Fake) -> None:
    text = "<think>Hm.</think>\n\nFour."
    fake(text.encode())
    assert llmcli("run", "fake", "x", "--temp", "0").out == text + "\n"
    assert llmcli("run", "fake", "x", "--temp", "0", "--hidethinking").out == "Four.\n"
    assert llmcli("chat", "fake", "--temp", "0", "--hidethinking", stdin=b"x\n").out == "Four.\n"
    document = json.loads(llmcli("run", "fake", "x", "--temp", "0", "--json", "--hidethinking").out)
    assert document["text"] == text  # JSON has the full text and both parts
    assert (document["thinking"], document["content"]) == ("<think>Hm.</think>", "Four.")


@pytest.mark.parametrize("spelling", ["-rea", "--reasoning", "--think"])
def test_reasoning_reaches_the_template(spelling: str, llmcli: Llmcli, fake: Fake) -> None:
    template = (
        "{{ messages[0].content }}{% if enable_thinking == false %}<think></think>{% endif %}"
    )
    opened = fake(b"yes", template=template)
    for mode, end in (("on", "x"), ("off", "x<think></think>"), ("auto", "x")):
        assert llmcli("run", "fake", "x", spelling, mode).code == 0
        context_text = bytes(token for token in opened[-1].engine.ledger.tokens[0] if token < 256)
        assert context_text.startswith(end.encode() + b"yes"[:1])


@pytest.mark.parametrize(
    ("mode", "message"), [("maybe", "one of: auto, on, off"), ("on", "--hidethinking")]
)
def test_reasoning_is_refused_without_a_template_that_reads_it(
    mode: str, message: str, llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"yes")
    done = llmcli("run", "fake", "x", "--reasoning", mode)
    assert done.code == 1
    assert message in done.err


def test_markdown_is_printed_as_is_without_a_terminal(llmcli: Llmcli, fake: Fake) -> None:
    text = "# One\n**two**\n\n- three"
    fake(text.encode())
    assert llmcli("run", "fake", "x", "--temp", "0", "--markdown").out == text + "\n"
    assert (
        llmcli("chat", "fake", "--temp", "0", stdin=b"/set markdown on\nx\n").out
        == "markdown = on\n" + text + "\n"
    )
