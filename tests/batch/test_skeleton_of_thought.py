"""Skeleton-of-Thought: the outline, the texts of its points, and the joined answer."""

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


def skeleton_reply(tokens: list[int]) -> int:
    """Return the fake model's next token. It answers the outline prompt with OUTLINE, and the
    prompt of a point with the last letter of the point, three times.
    """
    text = bytes(token for token in tokens if token < 256)
    if b"Give only the outline" in text:
        return saying(OUTLINE)(tokens)
    prompt, _, answer = text.rpartition(b"<assistant>")
    return prompt.rstrip()[-1] if len(answer) < 3 else EOS


def chat_form(context: FakeContext, **fields: Any) -> ChatForm:
    """Return the parsed chat request "How?" for a fake model, with further request fields."""
    runner = fake_runner(context=context)
    settings = ServerSettings(
        ("fake",), sampling=default_sampling().with_values({"temp": 0, "seed": 1})
    )
    return ChatForm(
        {"messages": [{"role": "user", "content": "How?"}], "max_tokens": 300, **fields},
        runner,
        settings,
    )


def run_plan(plan: AnswerPlan, form: ChatForm) -> Any:
    """Run the plan on the form's engine and return its document."""
    documents: list[Any] = []
    executor = BatchExecutor(form.runner, 8, lambda index, document: documents.append(document))
    executor.run(iter([BatchTask.begin(0, plan)]))
    form.runner.engine.check()
    return documents[0]


def test_points_are_answered_in_parallel_and_joined() -> None:
    context = FakeContext(n_ctx=4096, n_seq_max=8, n_batch=2048, reply=skeleton_reply)
    form = chat_form(context)
    document = run_plan(skeleton_of_thought.skeleton(form), form)
    assert document["skeleton"] == [
        {"point": "Find out first", "text": "ttt"},
        {"point": "Then", "text": "nnn"},
        {"point": "Tell them", "text": "mmm"},
    ]
    message = document["choices"][0]["message"]
    assert message["content"] == "1. Find out first: ttt\n\n2. Then: nnn\n\n3. Tell them: mmm"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == len(OUTLINE) + 3 * 3
    assert 3 in context.batches  # one pass with a token of each point
    # The question and the outline are computed for the first point only.
    assert (
        document["usage"]["prompt_tokens_details"]["cached_tokens"]
        > document["usage"]["prompt_tokens"] // 3
    )


def test_without_an_outline_the_request_is_answered_plainly() -> None:
    def reply_without_outline(tokens: list[int]) -> int:
        return (
            saying(b"plain")(tokens)
            if b"outline" not in bytes(t for t in tokens if t < 256)
            else ord("x")
        )

    form = chat_form(FakeContext(n_ctx=512, n_seq_max=8, n_batch=512, reply=reply_without_outline))
    document = run_plan(skeleton_of_thought.skeleton(form), form)
    assert document["choices"][0]["message"]["content"] == "plain"
    assert "skeleton" not in document


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "leave out n"),
        ({"messages": [{"role": "assistant", "content": "so"}]}, "with a user's text at its end"),
    ],
)
def test_a_request_that_is_not_a_single_question_raises_an_error(
    fields: dict[str, Any], message: str
) -> None:
    form = chat_form(FakeContext(n_ctx=2048, n_seq_max=8, n_batch=512), **fields)
    with pytest.raises(ApiError, match=message):
        next(skeleton_of_thought.skeleton(form))


def test_the_grammar_accepts_three_to_ten_points() -> None:
    from llmcli.runtime.constraint.base import Constraint, accepts

    runner = fake_runner()
    grammar = runner.grammars(Constraint("gbnf", skeleton_of_thought.outline_grammar()))
    for count, is_accepted in ((2, False), (3, True), (10, True), (11, False)):
        text = "\n".join(f"{number}. Point {number}" for number in range(1, count + 1))
        assert accepts(grammar, list(text.encode())) == is_accepted
