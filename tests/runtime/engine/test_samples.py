"""Several answers to one prompt: each depends only on its seed, and the prompt is computed once."""

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import N_SEEDS, default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel

WILD = default_sampling().with_values({"temp": 6, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 11})
PROMPT = tuple(b"tell me something")


def engine(**more) -> tuple[Engine, FakeContext]:
    model = FakeModel()
    context = FakeContext(**{"n_ctx": 512, "reply": lambda tokens: ord("a"), **more})
    return Engine(context, model, None), context


def finish(machine: Engine, ids: list[int]) -> list[Answer]:
    for _ in range(2000):
        if not machine.is_busy:
            machine.ledger.check()
            return [machine.pop_answer(one) for one in ids]
        machine.step()
    raise AssertionError("it never ended")


def alone(seed: int, **more) -> Answer:
    machine, _ = engine()
    request = Request(PROMPT, WILD.with_values({"seed": seed}), **{"max_tokens": 12, **more})
    return finish(machine, [machine.submit(request)])[0]


def said(answer: Answer) -> tuple[list[int], str]:
    return [token.id for token in answer.tokens], answer.finish


@pytest.mark.parametrize(
    "more",
    [
        {"n_seq_max": 4},
        {"n_seq_max": 2},
        {"n_seq_max": 1},
        {"n_seq_max": 4, "is_recurrent": True},
        {"n_seq_max": 4, "n_swa": 64},
        {"n_seq_max": 4, "n_batch": 5},
        {"n_seq_max": 4, "n_batch": 5, "abort_at": 1},
        {"n_seq_max": 4, "abort_at": 3},
    ],
    ids=str,
)
def test_every_sample_is_what_its_seed_says_alone(more):
    machine, _ = engine(**more)
    answers = finish(machine, machine.submit_samples(Request(PROMPT, WILD, max_tokens=12), 4))
    assert [answer.seed for answer in answers] == [11, 12, 13, 14]
    assert [said(answer) for answer in answers] == [said(alone(answer.seed)) for answer in answers]
    assert len({answer.text for answer in answers}) > 1


def test_an_end_that_is_ignored_by_one_is_not_lost_for_the_others():
    machine, _ = engine(n_seq_max=4)
    answers = finish(
        machine,
        machine.submit_samples(
            Request(PROMPT, WILD, max_tokens=12, ignore_eos=True, logprobs=True), 4
        ),
    )
    for answer in answers:
        by_itself = alone(answer.seed, ignore_eos=True, logprobs=True)
        assert said(answer) == said(by_itself)
        assert [t.logprob for t in answer.tokens] == pytest.approx(
            [t.logprob for t in by_itself.tokens], abs=1e-5
        )


def test_the_prompt_is_computed_once_and_its_cells_are_shared():
    machine, context = engine(n_seq_max=3)
    answers = finish(
        machine, machine.submit_samples(Request(PROMPT, WILD, max_tokens=8, ignore_eos=True), 3)
    )
    assert context.batches == [len(PROMPT)] + [3] * 7
    assert machine.ledger.used_cells == context.used == len(PROMPT) + 3 * 7
    assert [answer.cached_tokens for answer in answers] == [0, len(PROMPT), len(PROMPT)]


def test_a_sample_that_is_cancelled_early_takes_no_other_with_it():
    machine, _ = engine(n_seq_max=3, n_batch=5)
    ids = machine.submit_samples(Request(PROMPT, WILD, max_tokens=8), 3)
    machine.step()  # a part of the prompt
    machine.cancel(ids[0])
    machine.cancel(ids[1])
    first, second, third = finish(machine, ids)
    assert (first.finish, second.finish) == ("cancelled", "cancelled")
    assert said(third) == said(alone(13, max_tokens=8))


def test_other_requests_run_beside_samples():
    machine, _ = engine(n_seq_max=3)
    ids = machine.submit_samples(Request(PROMPT, WILD, max_tokens=8), 2)
    other = machine.submit(
        Request(tuple(b"another"), default_sampling().with_values({"temp": 0}), max_tokens=5)
    )
    *samples, last = finish(machine, [*ids, other])
    assert [said(one) for one in samples] == [said(alone(seed, max_tokens=8)) for seed in (11, 12)]
    assert last.text == "aaaaa"


def test_seeds_count_on_from_the_largest():
    machine, _ = engine(n_seq_max=2)
    request = Request(PROMPT, WILD.with_values({"seed": N_SEEDS - 1}), max_tokens=2)
    assert [answer.seed for answer in finish(machine, machine.submit_samples(request, 2))] == [
        N_SEEDS - 1,
        0,
    ]


@pytest.mark.model
def test_on_a_real_model_the_prompt_is_held_once(smollm2):
    options = RunOptions(ctx_size=512, threads=1)
    with open_runner(smollm2, options, slots=3) as runner:
        prompt = runner.encode_text("One two three four")
        reply = runner.reply(Request(prompt, WILD, max_tokens=6, ignore_eos=True), 3)
        assert {event.sequence for event in reply} == set(reply.ids)
        runner.engine.ledger.check()
        assert runner.engine.ledger.used_cells == len(prompt) + 3 * 5
        assert [len(answer.tokens) for answer in reply.answers] == [6, 6, 6]
        report = runner.kv_report()
        assert report.predicted_bytes == report.allocated_bytes
