"""The budget of thinking tokens, and thinking that is ended from outside."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.repetition import MIN_LOOP_BYTES
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.requests.thinking import ThinkingLimit, ThinkingTracker
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.text.reasoning import THINKING_TAGS, ThinkingTags, split_thinking
from llmcli.types import Message
from tests.fixtures.fakes import EOS, fake_runner

GREEDY = default_sampling().with_values({"temp": 0})
TAGS = THINKING_TAGS[0]
# The template of a thinking model: it opens the thinking, and writes that of earlier answers.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
CLOSE = "\n</think>\n\n"


def thinking_model(thought: bytes = b"hm, ", reply: bytes = b"yes") -> Callable[[list[int]], int]:
    """Return a model that thinks `thought` again and again until its thinking is ended, and then
    says `reply`.
    """

    def speak(tokens: list[int]) -> int:
        text = bytes(token for token in tokens if token < 256)
        said = text.rpartition(b"<assistant>")[2].removeprefix(b"<think>\n")
        thinking, has_ended, answer = said.partition(b"</think>")
        if not has_ended:
            return thought[len(thinking) % len(thought)]
        n_said = len(answer.lstrip())
        return reply[n_said] if n_said < len(reply) else EOS

    return speak


def open_thinker(**settings: Any) -> Runner:
    settings.setdefault("template", TEMPLATE)
    return fake_runner(thinking_model(**settings.pop("model", {})), **settings)


def ask(runner: Runner, budget: int | None, **settings: Any) -> Answer:
    """Return the answer with this budget to a question."""
    reply = runner.reply(question(runner, budget, **settings))
    list(reply)
    return reply.answer


def question(runner: Runner, budget: int | None, **settings: Any) -> Request:
    tokens = runner.encode_chat([Message("user", "hi")])
    opened = runner.opened_tags(tokens)
    return Request(tokens, GREEDY, thinking=runner.thinking_limit(opened, budget), **settings)


@pytest.mark.parametrize("budget", [1, 2, 7, 40])
@pytest.mark.parametrize("strategy", ["plain", "guided", "speculative"])
def test_thinking_has_exactly_as_many_tokens_as_the_budget(budget: int, strategy: str) -> None:
    answer = ask(open_thinker(), budget, strategy=strategy)
    thought = (b"hm, " * 20)[:budget].decode()
    assert answer.text == thought + CLOSE + "yes"
    assert answer.n_thinking == budget
    assert answer.finish == "stop"
    assert answer.answer_start == budget + len(CLOSE)
    assert "".join(token.text for token in answer.tokens if token.forced) == CLOSE
    assert answer.ttfo_ms == pytest.approx(
        sum(token.ms for token in answer.tokens[: budget + len(CLOSE) + 1])
    )


def test_a_budget_of_0_closes_the_thinking_at_once() -> None:
    answer = ask(open_thinker(), 0)
    # the template's opening tag already ends its line
    assert (answer.text, answer.n_thinking) == ("</think>\n\nyes", 0)
    opening = open_thinker(template=TEMPLATE.replace("<assistant><think>\n", "<assistant>"))
    opening.context.speak = _open_first(opening.context.speak)  # type: ignore[attr-defined]
    answer = ask(opening, 0)
    assert (answer.text, answer.n_thinking) == ("<think></think>\n\nyes", 0)


def _open_first(speak: Callable[[list[int]], int]) -> Callable[[list[int]], int]:
    """Return a model that writes its opening tag itself."""

    def open_then_speak(tokens: list[int]) -> int:
        text = bytes(token for token in tokens if token < 256)
        said = text.rpartition(b"<assistant>")[2]
        return b"<think>"[len(said)] if len(said) < 7 else speak(tokens)

    return open_then_speak


def test_without_a_budget_the_thinking_ends_with_the_answer() -> None:
    answer = ask(open_thinker(), None, max_tokens=50)
    assert (answer.n_thinking, answer.answer_start, answer.ttfo_ms) == (50, None, None)


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    said = b"well\n</think>\n\nyes"
    runner = fake_runner(said, template=TEMPLATE)
    for budget in (5, 100, None):
        answer = ask(runner, budget)
        assert (answer.text, answer.n_thinking) == (said.decode(), 5)
        # at the limit the same text is forced
        assert any(token.forced for token in answer.tokens) == (budget == 5)


def test_a_closing_tag_that_has_begun_is_completed() -> None:
    answer = ask(open_thinker(model={"thought": b"ab</thx"}), 6)
    # of the six tokens, the last four already are the tag
    assert (answer.text, answer.n_thinking) == ("ab</think>\n\nyes", 2)


def test_a_thought_that_would_end_the_answer_is_followed_by_a_reply() -> None:
    runner = open_thinker()
    speak = runner.context.speak  # type: ignore[attr-defined]

    def stop_thinking(tokens: list[int]) -> int:
        text = bytes(token for token in tokens if token < 256)
        return EOS if text.endswith(b"hm") else int(speak(tokens))

    runner.context.speak = stop_thinking  # type: ignore[attr-defined]
    assert ask(runner, None).text == "hm"
    assert ask(runner, 100).text == f"hm{CLOSE}yes"


def test_a_forced_end_is_not_followed_by_an_empty_reply() -> None:
    """An end token is not drawn before the reply has text."""
    answer = ask(open_thinker(model={"reply": b""}), 3, max_tokens=20)
    assert split_thinking("<think>" + answer.text)[1]


def test_the_closing_text_counts_for_the_token_limit() -> None:
    answer = ask(open_thinker(), 3, max_tokens=6)
    assert (answer.text, answer.finish, answer.n_thinking) == ("hm,\n</", "length", 3)


def test_samples_have_a_budget_each() -> None:
    runner = open_thinker(n_seq_max=3)
    reply = runner.reply(question(runner, 5), 3)
    list(reply)
    assert [answer.text for answer in reply.answers] == [f"hm, h{CLOSE}yes"] * 3


def test_beams_have_no_budget() -> None:
    runner = open_thinker(n_seq_max=2)
    search = NO_SEARCH.with_values({"beams": 2})
    request = question(runner, 5, strategy="beam", search=search)
    with pytest.raises(UserError, match="no budget of thinking tokens"):
        runner.check_request(request)
    runner.check_request(question(runner, None, strategy="beam", search=search))


@pytest.mark.parametrize("strategy", ["plain", "speculative"])
def test_thinking_is_ended_from_outside(strategy: str) -> None:
    runner = open_thinker()
    reply = runner.reply(question(runner, None, strategy=strategy))
    for count, event in enumerate(reply):
        if count == 4 and event.token:
            reply.end_thinking()
    assert reply.answer.text == f"hm, h{CLOSE}yes"
    assert not runner.engine.end_thinking(*reply.ids)  # it has ended


def test_thinking_that_begins_just_now_is_ended() -> None:
    """The model has written a part of its opening tag."""
    runner = open_thinker(template=TEMPLATE.replace("<assistant><think>\n", "<assistant>"))
    runner.context.speak = _open_first(runner.context.speak)  # type: ignore[attr-defined]
    reply = runner.reply(question(runner, None))
    found = [
        runner.engine.end_thinking(*reply.ids)
        for count, event in enumerate(event for event in reply if event.token)
        if count == 3
    ]
    assert (found, reply.answer.text) == ([True], "<think></think>\n\nyes")


def test_ending_the_thinking_of_a_reply_has_no_effect() -> None:
    runner = fake_runner(b"a plain reply")
    reply = runner.reply(question(runner, None))
    found = [runner.engine.end_thinking(*reply.ids) for event in reply if event.token]
    assert reply.answer.text == "a plain reply"
    assert not any(found)


def test_a_loop_inside_bounded_thinking_ends_the_thinking_only() -> None:
    """The fake model repeats the same words without end."""
    runner = open_thinker(n_ctx=8192)
    unbounded = ask(runner, None)
    assert (unbounded.finish, unbounded.answer_start) == ("repetition", None)
    bounded = ask(runner, 8000)
    assert (bounded.finish, bounded.text[-len("yes") :]) == ("stop", "yes")
    assert MIN_LOOP_BYTES <= bounded.n_thinking < 8000


@pytest.mark.parametrize(
    ("marks", "said", "finish"),
    [
        ({}, b"<tool_call>", "repetition"),
        ({"structure_marks": ("<tool_call>",)}, b"<tool_call>", "context_full"),
        ({"structure_marks": ("<tool_call>",)}, b"text", "repetition"),
        ({"structure_starts": ("[",)}, b"[", "context_full"),
        ({"structure_starts": ("[",)}, b"text [", "repetition"),
    ],
)
def test_a_tool_call_is_never_cut_as_a_repetition(
    marks: dict[str, Any], said: bytes, finish: str
) -> None:
    loop = said + b"again and again. " * 300
    runner = fake_runner(loop, n_ctx=2560)
    tokens = runner.encode_chat([Message("user", "hi")])
    reply = runner.reply(Request(tokens, GREEDY, **marks))
    list(reply)
    assert reply.answer.finish == finish


def test_a_schema_follows_the_forced_end(stories_runner: Runner) -> None:
    """The grammar starts directly after the closing tag, and drafts do not change the answer."""
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    )
    runner = stories_runner
    grammar = runner.grammars(Constraint("json_schema", schema))
    tokens = runner.encode_text("Once upon a time <think>")
    request = Request(
        tokens,
        GREEDY,
        max_tokens=80,
        grammar=grammar,
        grammar_after="</think>",
        strategy="guided",
        thinking=runner.thinking_limit(TAGS, 9),
    )
    texts = []
    for strategy in ("guided", "speculative"):
        reply = runner.reply(replace(request, strategy=strategy))
        list(reply)
        thought, _, document = reply.answer.text.partition("</think>")
        assert json.loads(document)["a"] in (True, False)
        assert reply.answer.n_thinking == 9
        texts.append(thought)
    assert texts[0] == texts[1]


def count_inside(pieces: Sequence[bytes], opened: ThinkingTags | None) -> tuple[int, int | None]:
    tracker = ThinkingTracker(ThinkingLimit(lambda *_: (), opened))
    for piece in pieces:
        tracker.feed(piece)
    return tracker.n_inside, tracker.answer_start


@pytest.mark.parametrize(
    ("pieces", "opened", "inside", "start"),
    [
        ([b"a", b"b", b"</think>", b"\n\n", b"c"], TAGS, 2, 4),
        ([b"a", b"b</thi", b"nk>c"], TAGS, 2, 2),
        ([b"</", b"think", b">", b"c"], TAGS, 0, 3),
        ([b" <think>", b"a", b"</think>", b"c"], None, 1, 3),
        ([b"<thi", b"nk>a", b"b</think>c"], None, 2, 2),
        ([b"</think>", b"c"], None, 0, 1),
        ([b" ", b"<b>", b"<think>"], None, 0, 0),
        # a character of two tokens, and a token without text
        ([b"\xe2\x80", b"\x94", b"", b"</think>", b"c"], TAGS, 3, 4),
        ([b"[THINK]", b"a", b"</think>", b"[/THINK]", b"c"], None, 2, 4),
        ([b"a", b"</think", b" b"], TAGS, 3, None),
    ],
)
def test_tokens_inside_the_tags_are_counted(
    pieces: list[bytes], opened: ThinkingTags | None, inside: int, start: int | None
) -> None:
    assert count_inside(pieces, opened) == (inside, start)
