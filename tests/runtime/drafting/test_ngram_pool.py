"""Drafts from earlier answers: what a client's texts continued with is guessed, and nothing else."""

import random

import pytest

from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.ngram_pool import (
    KEY_TOKENS,
    MAX_POOLS,
    NO_TOKEN,
    NgramPool,
    PoolDrafter,
)
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.base import Speculation
from tests.fixtures.drafts import CHEAP, Steady
from tests.fixtures.fakes import EOS, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
POEM = b"whose woods these are I think I know. his house is in the village though"


def test_the_pool_agrees_with_a_dictionary() -> None:
    rng = random.Random(1)
    pool, known = NgramPool(), dict[tuple[int, ...], int]()
    for _ in range(40):
        text = [rng.randrange(6) for _ in range(rng.randrange(4, 60))]
        pool.add(text)
        for end in range(KEY_TOKENS, len(text)):
            known[tuple(text[end - KEY_TOKENS : end])] = text[end]
    assert len(known) > 500
    found = {key: pool.next_token(list(key)) for key in known}
    assert all(token in (known[key], NO_TOKEN) for key, token in found.items())
    n_replaced = list(found.values()).count(NO_TOKEN)  # by another key at the same place
    assert n_replaced < len(known) / 50
    unknown = [[rng.randrange(6, 150_000) for _ in range(KEY_TOKENS)] for _ in range(1000)]
    assert all(pool.next_token(key) == NO_TOKEN for key in unknown)


def engine_with_pool(n_slots: int = 1) -> tuple[Engine, FakeContext]:
    def speak(tokens: list[int]) -> int:
        at = len(tokens) - tokens.index(0) - 1
        return POEM[at] if at < len(POEM) else EOS

    context = FakeContext(n_ctx=512, n_seq_max=n_slots, reply=speak)
    resources = DrafterResources(FakeModel(), uses_pool=True)
    drafter = PoolDrafter.create(resources)
    assert drafter is not None
    speculation = Speculation((drafter,), Steady(CHEAP), 16)
    return Engine(context, FakeModel(), None, speculation), context


def answer(engine: Engine, prompt: bytes, client: str = "") -> tuple[str, int]:
    request = Request((*prompt, 0), GREEDY, strategy="speculative", client=client)
    number = engine.submit(request)
    while engine.is_busy:
        engine.step()
        engine.ledger.check()
    found = engine.pop_answer(number)
    return found.text, found.n_accepted


def test_a_later_answer_is_guessed_from_an_earlier_one() -> None:
    engine, context = engine_with_pool()
    assert answer(engine, b"recite") == (POEM.decode(), 0)
    n_passes = len(context.batches)
    text, n_accepted = answer(engine, b"again, please")
    assert text == POEM.decode()
    assert n_accepted > len(POEM) / 2
    assert len(context.batches) - n_passes < len(POEM) / 3


def test_answers_beside_others_are_learned_too() -> None:
    engine, _ = engine_with_pool(n_slots=2)
    for prompt in (b"recite", b"recite!"):
        engine.submit(Request((*prompt, 0), GREEDY, strategy="speculative"))
    while engine.is_busy:
        engine.step()
    assert answer(engine, b"again, please")[1] > len(POEM) / 2


def test_a_request_creates_no_pool_beside_that_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    created: list[int] = []
    create = NgramPool.__init__

    def count(self: NgramPool) -> None:
        created.append(1)
        create(self)

    monkeypatch.setattr(NgramPool, "__init__", count)
    engine, _ = engine_with_pool()
    for prompt in (b"recite", b"again", b"once more"):
        answer(engine, prompt)
    assert len(created) == 1


def test_clients_have_separate_pools_and_idle_ones_are_dropped() -> None:
    engine, _ = engine_with_pool()
    answer(engine, b"recite", "first")
    assert answer(engine, b"again", "second")[1] == 0
    assert answer(engine, b"again", "first")[1] > 0
    for number in range(MAX_POOLS):
        answer(engine, b"again", f"client {number}")
    assert answer(engine, b"again", "first")[1] == 0
