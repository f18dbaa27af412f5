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


def answer(
    grammar: Grammar, *, n_ctx: int = 256, seed: int = 5, **more: Any
) -> tuple[Answer, list[Event], FakeContext]:
    """One guided answer of a model that would rather say something else."""
    model, context = FakeModel(), FakeContext(reply=b"Well, let me see.", n_ctx=n_ctx)
    vocabulary = model
    engine = Engine(context, vocabulary, None, more.pop("speculation", None))
    sampling = default_sampling().with_values({"seed": seed, **more.pop("settings", {})})
    asked = {"strategy": "guided", "grammar": grammar, "logprobs": True, **more}
    one = engine.submit(Request(tuple(asked.pop("prompt", b"ask")), sampling, **asked))
    events: list[Event] = []
    while engine.is_busy:
        events += engine.step()
        engine.ledger.check()
    return engine.pop_answer(one), events, context


@pytest.mark.parametrize(
    "settings", [{}, {"temp": 0}, {"repeat_penalty": 1.3, "temp": 2, "top_k": 0}], ids=str
)
def test_jumping_changes_the_passes_and_not_the_answer(settings: dict[str, float]) -> None:
    told, passes = set(), {}
    for jump in JUMP_MODES:
        made, events, context = answer(schema(CALL, jump), settings=settings)
        document = json.loads(made.text)
        assert made.finish == "stop"
        assert set(document) == {"current", "unit"}
        assert "".join(event.text for event in events) == made.text
        told.add((made.text, tuple(token.id for token in made.tokens)))
        forced = [token for token in made.tokens if token.forced]
        assert bool(forced) == (jump != "off")
        assert all(token.logprob is None for token in forced)
        assert all(token.logprob is not None for token in made.tokens if not token.forced)
        assert sum(token.constraint_ms for token in made.tokens) > 0
        passes[jump] = len(context.batches)
        assert sum(context.batches) <= 3 + len(made.tokens)
        if jump != "off":
            assert passes[jump] == 1 + sum(not token.forced for token in made.tokens[1:])
    assert len(told) == 1
    assert passes["lossless"] < passes["off"] / 2


def test_an_answer_ends_without_a_pass_for_the_end() -> None:
    made, _, context = answer(gbnf('root ::= ("yes" | "no") "!"'))
    assert made.text in ("yes!", "no!")
    assert len(context.batches) == 1
    made, _, context = answer(gbnf('root ::= ("yes" | "no") "!"', "off"))
    assert len(context.batches) == len(made.text)


@pytest.mark.parametrize("jump", JUMP_MODES)
def test_limits_and_stops_hold_within_forced_text(jump: str) -> None:
    made, _, _ = answer(schema(CALL, jump), max_tokens=5)
    assert (made.text, made.finish, len(made.tokens)) == ('{"cur', "length", 5)
    made, _, _ = answer(schema(CALL, jump), stops=("ent",))
    assert (made.text, made.finish) == ('{"curr', "stop")
    made, _, _ = answer(schema(CALL, jump), max_tokens=0)
    assert (made.text, made.finish) == ("", "length")


@pytest.mark.parametrize("n_ctx", range(5, 15))
def test_a_full_context_ends_forced_text_where_it_ends_drawn_text(n_ctx: int) -> None:
    jumped, drawn = (answer(schema(CALL, jump), n_ctx=n_ctx)[0] for jump in ("lossless", "off"))
    assert (jumped.text, jumped.finish) == (drawn.text, drawn.finish)
    assert jumped.finish == "context_full"
    assert len(jumped.tokens) == n_ctx + 1 - 3


def test_samples_each_follow_the_grammar_with_a_seed_of_their_own() -> None:
    model = FakeModel()
    engine = Engine(FakeContext(n_seq_max=3), model, None)
    sampling = default_sampling().with_values({"seed": 5})
    request = Request(tuple(b"ask"), sampling, strategy="guided", grammar=schema(CALL))
    ids = engine.submit_samples(request, 3)
    while engine.is_busy:
        engine.step()
    texts = [engine.pop_answer(one).text for one in ids]
    assert texts == [answer(schema(CALL), seed=seed)[0].text for seed in (5, 6, 7)]


LIST = {"type": "array", "items": CALL, "minItems": 3, "maxItems": 3}


@pytest.mark.parametrize("jump", JUMP_MODES)
@pytest.mark.parametrize("settings", [{}, {"temp": 0}, {"mirostat": 2}], ids=str)
@pytest.mark.parametrize("right", [1, 0.7, 0])
def test_guesses_change_neither_the_answer_nor_what_was_forced(
    jump: str, settings: dict[str, float], right: float
) -> None:
    grammar = schema(LIST, jump)
    alone, _, _ = answer(grammar, settings=settings)
    drafter = Knowing([token.id for token in alone.tokens], right)
    guessed, _, context = answer(
        grammar,
        settings=settings,
        speculation=Speculation((drafter,), Steady(CHEAP), 16),
        strategy="speculative",
    )
    assert len(json.loads(guessed.text)) == 3
    assert guessed.finish == "stop"
    for one, other in zip(alone.tokens, guessed.tokens, strict=True):
        assert (one.id, one.forced, one.logprob) == (other.id, other.forced, other.logprob)
    assert (sum(accepted for _, accepted in drafter.results) > 0) == (right > 0)
    if right == 1 and jump == "off":
        assert len(context.batches) < len(alone.tokens) / 2


@pytest.mark.parametrize("jump", JUMP_MODES)
@pytest.mark.parametrize("strategy", ["guided", "speculative"])
def test_a_document_goes_on_where_the_context_moves_on(jump: str, strategy: str) -> None:
    many = {**LIST, "minItems": 6, "maxItems": 6}
    moved, _, _ = answer(
        schema(many, jump), n_ctx=40, overflow=AttentionSinks(3), strategy=strategy
    )
    assert moved.finish == "stop"
    assert moved.overflow_stats.times > 2
    assert len(json.loads(moved.text)) == 6
    assert len(moved.tokens) > 150
    more = {
        "overflow": AttentionSinks(3),
        "strategy": strategy,
        "grammar_after": "see.",
        "settings": {"temp": 0},
    }
    thought, _, _ = answer(schema(CALL, jump), n_ctx=26, prompt=b"asked", **more)
    assert thought.overflow_stats.times > 2
    assert thought.text.startswith("Well, let me see.{")
    assert set(json.loads(thought.text.partition("see.")[2])) == {"current", "unit"}
