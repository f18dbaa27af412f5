"""Beam search inside a grammar: the same answers as transformers with the same allowed tokens, and
documents that jsonschema accepts.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.grammar import NativeGrammars
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.constraint.base import Constraint, Grammar, Matcher, UnsatisfiableConstraint
from llmcli.runtime.constraint.compile import GrammarCompiler
from llmcli.runtime.constraint.llguidance import GrammarMatcher
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures import beams
from tests.fixtures.fakes import EOS, N_VOCAB, FakeContext, FakeModel, FakeVocabulary
from tests.runtime.constraint.words import gbnf, schema

CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tom", "Lily", "a dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUBJECTS, VERBS, ENDINGS = (
    (" He", " She", " They both"),
    (" wanted", " saw", " was very"),
    (" a cat.", " happy.", " it!"),
)
TEXTS = {"".join(parts).encode() for parts in itertools.product(SUBJECTS, VERBS, ENDINGS)}
GBNF = "root ::= " + " ".join(
    f"({' | '.join(json.dumps(word) for word in words)})" for words in (SUBJECTS, VERBS, ENDINGS)
)


@pytest.fixture(scope="module")
def opened(stories_gguf: Path) -> Iterator[tuple[Context, Model, GrammarCompiler]]:
    options = ContextOptions(
        512, n_batch=512, n_seq_max=8, type_k="f32", type_v="f32", flash_attn="off"
    )
    with open_model(stories_gguf, ON_HOST) as model, open_context(model, options) as context:
        native = NativeGrammars(model)
        yield context, model, GrammarCompiler(model, native.compile)
        native.close()


@pytest.fixture(scope="module")
def oracle(stories: Path) -> Any:
    """Return the same model in transformers."""
    return beams.oracle(stories)


def allowed_by_texts(model: Model, answer: list[int]) -> list[int]:
    """Return the tokens that may follow `answer` so that it can become one of TEXTS. They are found
    in TEXTS, without a grammar.
    """
    text = b"".join(map(model.piece, answer))
    tokens = [
        t
        for t in range(model.n_vocab)
        if (p := model.piece(t)) and any(w.startswith(text + p) for w in TEXTS)
    ]
    # transformers continues even a text that no token may follow, so it gets the end token
    return tokens + [model.eos] * (text in TEXTS) or [model.eos]


def allowed_by_mask(model: Model, grammar: Grammar, answer: list[int]) -> list[int]:
    """Return the tokens that the grammar's matcher allows after `answer`."""
    matcher: Matcher = grammar.start(is_rigid=True)
    for token in answer:
        if model.is_end(token) or not matcher.allows(token):
            return [model.eos]
        matcher.accept(token)
    return np.flatnonzero(
        np.unpackbits(matcher.mask(), count=model.n_vocab, bitorder="little")
    ).tolist()


@pytest.mark.parametrize(
    ("number", "search"),
    [
        (0, BeamSettings(4)),
        (11, BeamSettings(2, 0.0)),
        (22, BeamSettings(8, 2.0, "never")),
        (33, BeamSettings(5, -1.0)),
    ],
)
def test_answers_among_given_texts_equal_those_of_transformers(
    number: int, search: BeamSettings, opened: tuple[Context, Model, GrammarCompiler], oracle: Any
) -> None:
    context, model, grammars = opened
    prompt = model.tokenize(beams.PROMPTS[number], special=False, add_special=True)
    expected = beams.theirs(
        oracle, prompt, search, 40, {model.eos}, lambda answer: allowed_by_texts(model, answer)
    )
    # llama.cpp's own engine allows every division of a text into tokens, as allowed_by_texts does
    grammar = grammars(Constraint("gbnf", GBNF, "llama"))
    assert beams.same(
        beams.ours(context, model, prompt, search, 40, {model.eos}, grammar), expected
    )
    assert len(expected) == search.beams
    assert all(b"".join(map(model.piece, tokens)) in TEXTS for tokens, _ in expected)


@pytest.mark.parametrize(
    ("number", "search"),
    [(5, BeamSettings(4)), (16, BeamSettings(3, 0.5, "never")), (27, BeamSettings(8, 1.0))],
)
def test_documents_equal_those_of_transformers_and_are_valid(
    number: int, search: BeamSettings, opened: tuple[Context, Model, GrammarCompiler], oracle: Any
) -> None:
    context, model, grammars = opened
    prompt = model.tokenize(beams.PROMPTS[number], special=False, add_special=True)
    grammar = grammars(Constraint("json_schema", json.dumps(CALL)))
    found = beams.ours(context, model, prompt, search, 60, {model.eos}, grammar)
    expected = beams.theirs(
        oracle,
        prompt,
        search,
        60,
        {model.eos},
        lambda answer: allowed_by_mask(model, grammar, answer),
    )
    assert beams.same(found, expected)
    assert len(found) == search.beams
    for tokens, _ in found:
        jsonschema.validate(json.loads(b"".join(map(model.piece, tokens))), CALL)


def search(
    grammar: Grammar, reply: bytes = b"Well, let me see.", beams: int = 4, **fields: Any
) -> Answer:
    """Return the answer of a beam search in the fake model, which would answer `reply` without the
    grammar.
    """
    model, context = FakeModel(), FakeContext(reply=reply, n_seq_max=beams)
    engine = Engine(
        context, FakeVocabulary(model.piece, fields.pop("ends", model.is_end), model.n_vocab), None
    )
    request = Request(
        tuple(b"ask"),
        default_sampling(),
        strategy="beam",
        search=BeamSettings(beams),
        grammar=grammar,
        **fields,
    )
    one = engine.submit(request)
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    assert engine.ledger.n_idle == beams
    return engine.pop_answer(one)


def test_every_answer_is_a_complete_document_without_a_limit() -> None:
    answer = search(schema(CALL), beams=6)
    documents = [json.loads(one.text) for one in answer.beams]
    for document in documents:
        jsonschema.validate(document, CALL)
    assert len({json.dumps(document) for document in documents}) == 6
    assert all(one.is_complete for one in answer.beams)
    assert answer.finish == "stop"
    assert sum(token.constraint_ms for token in answer.tokens) > 0
    assert not any(token.forced for token in answer.tokens)


def test_grammar_with_fewer_texts_than_beams_gives_one_answer_per_text() -> None:
    answer = search(gbnf('root ::= "yes" | "no"'), beams=5)
    assert {one.text for one in answer.beams} == {"yes", "no"}
    assert answer.finish == "stop"


def test_several_end_tokens_give_each_text_only_once() -> None:
    ends = (EOS, EOS + 1, EOS + 2).__contains__
    answer = search(gbnf('root ::= "yes" | "no"'), ends=ends)
    assert sorted(one.text for one in answer.beams) == ["no", "yes"]


def test_complete_answers_rank_before_likelier_ones_that_the_limit_cut() -> None:
    grammar = gbnf('root ::= "Well, let me see." | "W!"')
    cut = search(grammar, max_tokens=6)
    assert [(one.text, one.is_complete) for one in cut.beams] == [("W!", True), ("Well, ", False)]
    assert cut.beams[0].score < cut.beams[1].score
    assert (cut.text, cut.finish) == ("W!", "stop")
    assert search(grammar).text == "Well, let me see."


def test_answer_that_the_grammar_accepts_at_the_limit_is_complete() -> None:
    answer = search(gbnf("root ::= [a-zA-Z]+"), max_tokens=4)
    assert all(one.is_complete and len(one.text) <= 4 for one in answer.beams)


def test_answer_that_a_stop_string_cuts_is_not_complete() -> None:
    answer = search(gbnf('root ::= "Well, let" [a-z .]+ "!"'), stops=(" me",), max_tokens=40)
    assert ("Well, let", False) in [(one.text, one.is_complete) for one in answer.beams]


def test_grammar_starts_after_the_thinking_and_no_answer_ends_inside_it() -> None:
    reply = b'Let me see.</think>{"name": "Lily", "age": 7}'
    answer = search(schema(CALL), reply=reply, grammar_after="</think>", max_tokens=80, beams=3)
    assert answer.text == reply.decode()
    for one in answer.beams:
        jsonschema.validate(json.loads(one.text.partition("</think>")[2]), CALL)
    thinking = search(schema(CALL), reply=b"Hm", grammar_after="</think>", max_tokens=9, beams=2)
    assert [one.is_complete for one in thinking.beams] == [False, False]


def test_grammar_that_allows_no_token_fails_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = schema(CALL)
    monkeypatch.setattr(GrammarMatcher, "mask", lambda self: np.zeros(-(-N_VOCAB // 8), np.uint8))
    answer = search(grammar, beams=2)
    assert answer.finish == "failed"
    assert isinstance(
        answer.error, UnsatisfiableConstraint
    ) and "no token of the model can follow" in str(answer.error)


@pytest.mark.parametrize("stop_after", [1, 3, 8])
def test_cancelled_search_returns_the_best_answer_so_far(stop_after: int) -> None:
    model, context = FakeModel(), FakeContext(n_seq_max=3)
    engine = Engine(context, model, None)
    request = Request(
        tuple(b"x"),
        default_sampling(),
        strategy="beam",
        search=BeamSettings(3),
        grammar=schema(CALL),
    )
    one = engine.submit(request)
    for _ in range(stop_after):
        engine.step()
    engine.cancel(one)
    engine.step()
    answer = engine.pop_answer(one)
    assert answer.finish == "cancelled"
    assert answer.text == '{"name": '[:stop_after]
    assert not answer.beams[0].is_complete
