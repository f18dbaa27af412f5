"""Several answers to one prompt: each depends only on its seed, and the prompt is computed once."""

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import N_SEEDS, default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel

RANDOM_SAMPLING = default_sampling().with_values(
    {"temp": 6, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 11}
)
PROMPT = tuple(b"tell me something")


def make_engine(**more) -> tuple[Engine, FakeContext]:
    model = FakeModel()
    context = FakeContext(**{"n_ctx": 512, "reply": lambda tokens: ord("a"), **more})
    return Engine(context, model, None), context


def finish(engine: Engine, ids: list[int]) -> list[Answer]:
    for _ in range(2000):
        if not engine.is_busy:
            engine.ledger.check()
            return [engine.pop_answer(number) for number in ids]
        engine.step()
    raise AssertionError("the answers do not end")


def answer_alone(seed: int, **more) -> Answer:
    engine, _ = make_engine()
    request = Request(
        PROMPT, RANDOM_SAMPLING.with_values({"seed": seed}), **{"max_tokens": 12, **more}
    )
    return finish(engine, [engine.submit(request)])[0]


def ids_and_finish(answer: Answer) -> tuple[list[int], str]:
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
def test_every_sample_has_the_same_answer_as_its_seed_alone(more):
    engine, _ = make_engine(**more)
    answers = finish(
        engine, engine.submit_samples(Request(PROMPT, RANDOM_SAMPLING, max_tokens=12), 4)
    )
    assert [answer.seed for answer in answers] == [11, 12, 13, 14]
    assert [ids_and_finish(answer) for answer in answers] == [
        ids_and_finish(answer_alone(answer.seed)) for answer in answers
    ]
    assert len({answer.text for answer in answers}) > 1


@pytest.mark.parametrize("kind", [{"n_swa": 64}, {"is_recurrent": True}], ids=str)
def test_samples_wait_when_the_system_has_no_memory_for_copies_of_states(kind):
    class FullMemory(FakeContext):
        def read_checkpoint(self, sequence: int) -> memoryview:
            raise MemoryError

    context = FullMemory(n_ctx=512, reply=lambda tokens: ord("a"), n_seq_max=4, **kind)
    engine = Engine(context, FakeModel(), None, schedule=Schedule(host_bytes=1 << 20))
    answers = finish(
        engine, engine.submit_samples(Request(PROMPT, RANDOM_SAMPLING, max_tokens=12), 4)
    )
    assert [ids_and_finish(answer) for answer in answers] == [
        ids_and_finish(answer_alone(answer.seed)) for answer in answers
    ]


def test_an_ignored_end_token_in_one_sample_does_not_change_the_others():
    engine, _ = make_engine(n_seq_max=4)
    answers = finish(
        engine,
        engine.submit_samples(
            Request(PROMPT, RANDOM_SAMPLING, max_tokens=12, ignore_eos=True, logprobs=True), 4
        ),
    )
    for answer in answers:
        expected = answer_alone(answer.seed, ignore_eos=True, logprobs=True)
        assert ids_and_finish(answer) == ids_and_finish(expected)
        assert [t.logprob for t in answer.tokens] == pytest.approx(
            [t.logprob for t in expected.tokens], abs=1e-5
        )


def test_the_prompt_is_computed_once_and_its_cells_are_shared():
    engine, context = make_engine(n_seq_max=3)
    answers = finish(
        engine,
        engine.submit_samples(Request(PROMPT, RANDOM_SAMPLING, max_tokens=8, ignore_eos=True), 3),
    )
    assert context.batches == [len(PROMPT)] + [3] * 7
    assert engine.ledger.used_cells == context.used == len(PROMPT) + 3 * 7
    assert [answer.cached_tokens for answer in answers] == [0, len(PROMPT), len(PROMPT)]


def test_a_sample_cancelled_during_the_prompt_does_not_change_the_others():
    engine, _ = make_engine(n_seq_max=3, n_batch=5)
    ids = engine.submit_samples(Request(PROMPT, RANDOM_SAMPLING, max_tokens=8), 3)
    engine.step()  # a part of the prompt
    engine.cancel(ids[0])
    engine.cancel(ids[1])
    first, second, third = finish(engine, ids)
    assert (first.finish, second.finish) == ("cancelled", "cancelled")
    assert ids_and_finish(third) == ids_and_finish(answer_alone(13, max_tokens=8))


def test_other_requests_run_together_with_samples():
    engine, _ = make_engine(n_seq_max=3)
    ids = engine.submit_samples(Request(PROMPT, RANDOM_SAMPLING, max_tokens=8), 2)
    other = engine.submit(
        Request(tuple(b"another"), default_sampling().with_values({"temp": 0}), max_tokens=5)
    )
    *samples, last = finish(engine, [*ids, other])
    assert [ids_and_finish(answer) for answer in samples] == [
        ids_and_finish(answer_alone(seed, max_tokens=8)) for seed in (11, 12)
    ]
    assert last.text == "aaaaa"


def test_the_seed_after_the_largest_is_zero():
    engine, _ = make_engine(n_seq_max=2)
    request = Request(PROMPT, RANDOM_SAMPLING.with_values({"seed": N_SEEDS - 1}), max_tokens=2)
    assert [answer.seed for answer in finish(engine, engine.submit_samples(request, 2))] == [
        N_SEEDS - 1,
        0,
    ]


@pytest.mark.model
def test_with_a_real_model_the_prompt_is_stored_once(smollm2):
    options = RunOptions(ctx_size=512, threads=1)
    with open_runner(smollm2, options, slots=3) as runner:
        prompt = runner.encode_text("One two three four")
        reply = runner.reply(Request(prompt, RANDOM_SAMPLING, max_tokens=6, ignore_eos=True), 3)
        assert {event.sequence for event in reply} == set(reply.ids)
        runner.engine.ledger.check()
        assert runner.engine.ledger.used_cells == len(prompt) + 3 * 5
        assert [len(answer.tokens) for answer in reply.answers] == [6, 6, 6]
        report = runner.kv_report()
        assert report.predicted_bytes == report.allocated_bytes
