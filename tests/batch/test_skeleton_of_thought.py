"""Skeleton-of-Thought: an outline by a grammar, its points in parallel, one text."""

from typing import Any

import pytest

from llmcli.api.errors import ApiError
from llmcli.api.forms.openai_chat import ChatForm
from llmcli.api.server_settings import ServerSettings
from llmcli.batch import skeleton_of_thought
from llmcli.batch.executor import BatchExecutor, BatchTask
from llmcli.batch.plans import AnswerPlan
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import EOS, FakeContext, fake_runner, saying

OUTLINE = b"1. Find out first\n2. Then: write it down\n3. Tell them\n4. Tell them"


def speak(tokens: list[int]) -> int:
    """An outline where one is asked for, else the point's own last letter, up to three of it."""
    text = bytes(token for token in tokens if token < 256)
    if b"Give only the outline" in text:
        return saying(OUTLINE)(tokens)
    prompt, _, said = text.rpartition(b"<assistant>")
    return prompt.rstrip()[-1] if len(said) < 3 else EOS


def form(context: FakeContext, **more: Any) -> ChatForm:
    runner = fake_runner(context=context)
    settings = ServerSettings(
        ("fake",), sampling=default_sampling().with_values({"temp": 0, "seed": 1})
    )
    return ChatForm(
        {"messages": [{"role": "user", "content": "How?"}], "max_tokens": 300, **more},
        runner,
        settings,
    )


def came(plan: AnswerPlan, asked: ChatForm) -> Any:
    found: list[Any] = []
    work = BatchExecutor(asked.runner, 8, lambda index, document: found.append(document))
    work.run(iter([BatchTask.begin(0, plan)]))
    asked.runner.engine.check()
    return found[0]


def test_points_are_answered_at_once_and_joined() -> None:
    context = FakeContext(n_ctx=4096, n_seq_max=8, n_batch=2048, reply=speak)
    asked = form(context)
    document = came(skeleton_of_thought.skeleton(asked), asked)
    assert document["skeleton"] == [
        {"point": "Find out first", "text": "ttt"},
        {"point": "Then", "text": "nnn"},
        {"point": "Tell them", "text": "mmm"},
    ]
    message = document["choices"][0]["message"]
    assert message["content"] == "1. Find out first: ttt\n\n2. Then: nnn\n\n3. Tell them: mmm"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == len(OUTLINE) + 3 * 3
    assert 3 in context.batches  # the points' tokens, in one pass
    # Question and outline are computed by the first point alone.
    assert (
        document["usage"]["prompt_tokens_details"]["cached_tokens"]
        > document["usage"]["prompt_tokens"] // 3
    )


def test_without_an_outline_the_plain_answer_comes() -> None:
    def rambling(tokens: list[int]) -> int:
        return (
            saying(b"plain")(tokens)
            if b"outline" not in bytes(t for t in tokens if t < 256)
            else ord("x")
        )

    asked = form(FakeContext(n_ctx=512, n_seq_max=8, n_batch=512, reply=rambling))
    document = came(skeleton_of_thought.skeleton(asked), asked)
    assert document["choices"][0]["message"]["content"] == "plain"
    assert "skeleton" not in document


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"n": 2}, "leave out n"),
        ({"messages": [{"role": "assistant", "content": "so"}]}, "with a user's text at its end"),
    ],
)
def test_what_is_no_single_question_is_refused(more: dict[str, Any], told: str) -> None:
    asked = form(FakeContext(n_ctx=2048, n_seq_max=8, n_batch=512), **more)
    with pytest.raises(ApiError, match=told):
        next(skeleton_of_thought.skeleton(asked))


def test_the_grammar_lets_three_to_ten_points_through() -> None:
    from llmcli.runtime.constraint.base import Constraint, accepts

    runner = fake_runner()
    grammar = runner.grammars(Constraint("gbnf", skeleton_of_thought.outline_grammar()))
    for count, good in ((2, False), (3, True), (10, True), (11, False)):
        text = "\n".join(f"{number}. Point {number}" for number in range(1, count + 1))
        assert accepts(grammar, list(text.encode())) == good
