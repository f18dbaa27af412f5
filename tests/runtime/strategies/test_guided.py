"""The guided strategy: forced text, limits, samples and drafts inside a grammar."""

import json
from typing import Any

import pytest

from llmcli.runtime.constraint.base import JUMP_MODES, Grammar
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.context_overflow import AttentionSinks
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from llmcli.types import Event
from tests.fixtures.drafts import CHEAP, Knowing, Steady
from tests.fixtures.fakes import FakeContext, FakeModel
from tests.runtime.constraint.words import gbnf, schema

CALL = {
    "type": "object",
    "properties": {
        "current": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["ampere", "volt"]},
    },
    "required": ["current", "unit"],
    "additionalProperties": False,
}


def generate(
    grammar: Grammar, *, n_ctx: int = 256, seed: int = 5, **more: Any
) -> tuple[Answer, list[Event], FakeContext]:
    """Return the guided answer of a model that would answer "Well, let me see." without a grammar,
    with its events and its context.
    """
    context = FakeContext(reply=b"Well, let me see.", n_ctx=n_ctx)
    engine = Engine(
        context,
        FakeModel(),
        None,
        more.pop("speculation", None),
        exact_rows=more.pop("exact_rows", 64),
    )
    sampling = default_sampling().with_values({"seed": seed, **more.pop("settings", {})})
    fields = {"strategy": "guided", "grammar": grammar, "logprobs": True, **more}
    one = engine.submit(Request(tuple(fields.pop("prompt", b"ask")), sampling, **fields))
    events: list[Event] = []
    while engine.is_busy:
        events += engine.step()
        engine.ledger.check()
    return engine.pop_answer(one), events, context


@pytest.mark.parametrize(
    "settings", [{}, {"temp": 0}, {"repeat_penalty": 1.3, "temp": 2, "top_k": 0}], ids=str
)
def test_jump_mode_changes_the_number_of_passes_but_not_the_answer(
    settings: dict[str, float],
) -> None:
    results, passes = set(), {}
    for jump in JUMP_MODES:
        answer, events, context = generate(schema(CALL, jump), settings=settings)
        document = json.loads(answer.text)
        assert answer.finish == "stop"
        assert set(document) == {"current", "unit"}
        assert "".join(event.text for event in events) == answer.text
        results.add((answer.text, tuple(token.id for token in answer.tokens)))
        forced = [token for token in answer.tokens if token.forced]
        assert bool(forced) == (jump != "off")
        assert all(token.logprob is None for token in forced)
        assert all(token.logprob is not None for token in answer.tokens if not token.forced)
        assert sum(token.constraint_ms for token in answer.tokens) > 0
        passes[jump] = len(context.batches)
        assert sum(context.batches) <= 3 + len(answer.tokens)
        if jump != "off":
            assert passes[jump] == 1 + sum(not token.forced for token in answer.tokens[1:])
    assert len(results) == 1
    assert passes["lossless"] < passes["off"] * 0.6


@pytest.mark.parametrize("exact_rows", [1, 2, 4])
def test_lossless_jumps_need_passes_whose_rows_are_exact(exact_rows: int) -> None:
    expected, _, plain = generate(schema(CALL, "off"), exact_rows=exact_rows)
    answer, _, context = generate(schema(CALL, "lossless"), exact_rows=exact_rows)
    assert answer.text == expected.text
    assert max(context.batches[1:]) <= exact_rows
    n_tail = len('metre"}') - 1  # of the unit, once its first letter is drawn
    assert len(context.batches) <= len(plain.batches) / exact_rows + n_tail + exact_rows * 4
    # the end of the answer needs no pass, so it is always inserted
    assert answer.tokens[-1].forced
    assert len(context.batches) < len(plain.batches)


def test_answer_ends_without_a_pass_for_the_end_token() -> None:
    answer, _, context = generate(gbnf('root ::= ("yes" | "no") "!"'))
    assert answer.text in ("yes!", "no!")
    assert len(context.batches) == 1
    answer, _, context = generate(gbnf('root ::= ("yes" | "no") "!"', "off"))
    assert len(context.batches) == len(answer.text)


@pytest.mark.parametrize("jump", JUMP_MODES)
def test_token_limit_and_stop_strings_apply_to_forced_text(jump: str) -> None:
    answer, _, _ = generate(schema(CALL, jump), max_tokens=5)
    assert (answer.text, answer.finish, len(answer.tokens)) == ('{"cur', "length", 5)
    answer, _, _ = generate(schema(CALL, jump), stops=("ent",))
    assert (answer.text, answer.finish) == ('{"curr', "stop")
    answer, _, _ = generate(schema(CALL, jump), max_tokens=0)
    assert (answer.text, answer.finish) == ("", "length")


@pytest.mark.parametrize("n_ctx", range(5, 15))
def test_full_context_ends_forced_text_where_it_ends_drawn_text(n_ctx: int) -> None:
    jumped, drawn = (generate(schema(CALL, jump), n_ctx=n_ctx)[0] for jump in ("lossless", "off"))
    assert (jumped.text, jumped.finish) == (drawn.text, drawn.finish)
    assert jumped.finish == "context_full"
    assert len(jumped.tokens) == n_ctx + 1 - 3


def test_each_sample_follows_the_grammar_with_its_own_seed() -> None:
    model = FakeModel()
    engine = Engine(FakeContext(n_seq_max=3), model, None)
    sampling = default_sampling().with_values({"seed": 5})
    request = Request(tuple(b"ask"), sampling, strategy="guided", grammar=schema(CALL))
    ids = engine.submit_samples(request, 3)
    while engine.is_busy:
        engine.step()
    texts = [engine.pop_answer(one).text for one in ids]
    assert texts == [generate(schema(CALL), seed=seed)[0].text for seed in (5, 6, 7)]


LIST = {"type": "array", "items": CALL, "minItems": 3, "maxItems": 3}


@pytest.mark.parametrize("jump", JUMP_MODES)
@pytest.mark.parametrize("settings", [{}, {"temp": 0}, {"mirostat": 2}], ids=str)
@pytest.mark.parametrize("right", [1, 0.7, 0])
def test_guesses_change_neither_the_answer_nor_its_forced_tokens(
    jump: str, settings: dict[str, float], right: float
) -> None:
    grammar = schema(LIST, jump)
    plain, _, _ = generate(grammar, settings=settings)
    drafter = Knowing([token.id for token in plain.tokens], right)
    speculative, _, context = generate(
        grammar,
        settings=settings,
        speculation=Speculation((drafter,), Steady(CHEAP), 16),
        strategy="speculative",
    )
    assert len(json.loads(speculative.text)) == 3
    assert speculative.finish == "stop"
    for one, other in zip(plain.tokens, speculative.tokens, strict=True):
        assert (one.id, one.forced, one.logprob) == (other.id, other.forced, other.logprob)
    assert (sum(accepted for _, accepted in drafter.results) > 0) == (right > 0)
    if right == 1 and jump == "off":
        assert len(context.batches) < len(plain.tokens) / 2


@pytest.mark.parametrize("exact_rows", [4, 8])
def test_forced_text_and_guesses_together_have_exact_rows_only(exact_rows: int) -> None:
    grammar = schema(LIST, "lossless")
    plain, _, _ = generate(grammar, exact_rows=exact_rows)
    drafter = Knowing([token.id for token in plain.tokens])
    found, _, context = generate(
        grammar,
        exact_rows=exact_rows,
        speculation=Speculation((drafter,), Steady(CHEAP), exact_rows),
        strategy="speculative",
    )
    assert found.text == plain.text
    assert found.n_accepted
    assert max(context.batches[1:]) <= exact_rows


@pytest.mark.parametrize("jump", JUMP_MODES)
@pytest.mark.parametrize("strategy", ["guided", "speculative"])
def test_document_is_completed_although_tokens_are_dropped_from_the_context(
    jump: str, strategy: str
) -> None:
    many = {**LIST, "minItems": 6, "maxItems": 6}
    shifted, _, _ = generate(
        schema(many, jump), n_ctx=40, overflow=AttentionSinks(3), strategy=strategy
    )
    assert shifted.finish == "stop"
    assert shifted.overflow_stats.times > 2
    assert len(json.loads(shifted.text)) == 6
    assert len(shifted.tokens) > 150
    more = {
        "overflow": AttentionSinks(3),
        "strategy": strategy,
        "grammar_after": "see.",
        "settings": {"temp": 0},
    }
    after_thinking, _, _ = generate(schema(CALL, jump), n_ctx=26, prompt=b"asked", **more)
    assert after_thinking.overflow_stats.times > 2
    assert after_thinking.text.startswith("Well, let me see.{")
    assert set(json.loads(after_thinking.text.partition("see.")[2])) == {"current", "unit"}
