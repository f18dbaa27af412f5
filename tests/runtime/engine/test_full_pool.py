"""A pool that is too small for all requests: every request still has the answer that it has
alone.
"""

import random
from dataclasses import replace

import pytest

from llmcli.errors import UserError
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel
from tests.fixtures.full_pool import storm

RANDOM_SAMPLING = default_sampling().with_values({"temp": 6, "top_k": 0, "top_p": 1, "min_p": 0})
STEMS = (b"the system says what is to be done and how; ", b"another one; ", b"")


def make_engine(schedule: Schedule, keeps_idle: bool = True, **more) -> tuple[Engine, FakeContext]:
    model = FakeModel()
    context = FakeContext(
        **{"n_ctx": 128, "n_seq_max": 6, "n_batch": 24, "reply": lambda tokens: ord("a"), **more}
    )
    return Engine(
        context,
        model,
        None,
        None,
        keeps_idle,
        schedule,
    ), context


def requests(count: int, rng: random.Random, beams: bool = True) -> list[Request]:
    result = []
    for _ in range(count):
        prompt = rng.choice(STEMS) + bytes(rng.choices(b"xyz", k=rng.randint(1, 30)))
        sampling = RANDOM_SAMPLING.with_values({"seed": rng.randrange(1000)})
        more = (
            {"strategy": "beam", "search": BeamSettings(beams=3)}
            if beams and rng.random() < 0.1
            else {}
        )
        result.append(
            Request(
                tuple(prompt),
                sampling,
                rng.randint(1, 30),
                ignore_eos=True,
                priority=rng.choice((0, 0, 0, 1)),
                client=rng.choice("ab"),
                **more,
            )
        )
    return result


def ids_and_finish(answer: Answer) -> tuple[list[int], str]:
    return [token.id for token in answer.tokens], answer.finish


def answer_alone(request: Request) -> tuple[list[int], str]:
    engine, _ = make_engine(Schedule())
    return ids_and_finish(storm(engine, [request], random.Random(0)).answers[0])


@pytest.mark.parametrize(
    ("memory", "schedule"),
    [
        ({}, Schedule(max_gap_seconds=0.05, host_bytes=1 << 20)),
        ({}, Schedule(max_running=4, max_chunk_rows=8, host_bytes=0)),
        ({}, Schedule(share_prefixes=False, max_rows=16)),
        ({"is_recurrent": True}, Schedule(host_bytes=1 << 20)),
        ({"n_swa": 24}, Schedule(max_gap_seconds=0.05, host_bytes=1 << 20)),
        ({}, Schedule(idle_offload="always", host_bytes=1 << 20)),
        ({}, Schedule(idle_offload="measured", host_bytes=2000)),
        ({}, Schedule(min_offload_rows=8, host_bytes=1 << 20)),
        ({}, Schedule(min_offload_rows=4, max_gap_seconds=0.05, host_bytes=400)),
        ({"n_swa": 24}, Schedule(min_offload_rows=8, host_bytes=1 << 20)),
    ],
    ids=str,
)
def test_in_a_full_pool_all_requests_have_the_same_answers_as_alone(memory, schedule):
    rng = random.Random(str(memory))
    all_requests = requests(50, rng, beams=not memory)
    engine, context = make_engine(schedule, **memory)
    result = storm(engine, all_requests, rng, check=lambda: check_cells(engine, context))
    assert result.preempted
    assert [ids_and_finish(result.answers[number]) for number in range(50)] == [
        answer_alone(request) for request in all_requests
    ]
    engine.ledger.evict_idle()
    assert engine.stats.used_cells == context.used == engine.scheduler.swap.nbytes == 0


@pytest.mark.parametrize("has_complete_states", [True, False])
def test_all_requests_end_when_idle_slots_are_evicted_only_as_a_whole(has_complete_states):
    rng = random.Random(2)
    all_requests = requests(20, rng, beams=False)
    engine, context = make_engine(
        Schedule(host_bytes=1 << 20), keeps_idle=False, has_complete_states=has_complete_states
    )
    result = storm(engine, all_requests, rng, check=lambda: check_cells(engine, context))
    assert result.preempted
    assert [ids_and_finish(result.answers[number]) for number in range(20)] == [
        answer_alone(request) for request in all_requests
    ]


@pytest.mark.parametrize("memory", [{}, {"is_recurrent": True}, {"n_swa": 24}], ids=str)
@pytest.mark.parametrize("keeps_idle", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_samples_of_one_prompt_have_the_same_answers_as_alone(seed, keeps_idle, memory):
    """Some samples are preempted before the first one has computed the prompt. They then compute it
    themselves, and may be preempted again.
    """
    rng = random.Random(seed)
    schedule = Schedule(max_chunk_rows=8, host_bytes=1 << 20)
    engine, context = make_engine(schedule, keeps_idle, **memory)
    waiting, ids, expected, answers = requests(24, rng, beams=False), [], [], {}
    while waiting or engine.is_busy:
        for request in [waiting.pop() for _ in range(min(len(waiting), rng.randrange(3)))]:
            count = rng.randint(1, 4)
            ids += engine.submit_samples(request, count)
            seeds = range(request.sampling["seed"], request.sampling["seed"] + count)
            expected += [
                answer_alone(replace(request, sampling=RANDOM_SAMPLING.with_values({"seed": seed})))
                for seed in seeds
            ]
        for event in engine.step():
            if event.finish:
                answers[event.sequence] = ids_and_finish(engine.pop_answer(event.sequence))
        engine.check()
        check_cells(engine, context)
    assert engine.stats.n_preemptions
    assert [answers[number] for number in ids] == expected
    assert engine.scheduler.swap.nbytes == 0


def test_a_sequence_whose_state_cannot_be_restored_is_recomputed(monkeypatch):
    rng = random.Random(11)
    all_requests = requests(12, rng, beams=False)
    engine, context = make_engine(Schedule(min_offload_rows=4, host_bytes=1 << 20))
    refused: list[int] = []
    monkeypatch.setattr(context, "write_state", lambda slot, *_, **__: bool(refused.append(slot)))
    result = storm(engine, all_requests, rng, check=lambda: check_cells(engine, context))
    assert refused
    assert [ids_and_finish(result.answers[number]) for number in range(len(all_requests))] == [
        answer_alone(request) for request in all_requests
    ]


def test_a_long_prompt_is_computed_while_the_cells_of_answers_are_offloaded(monkeypatch):
    engine, context = make_engine(Schedule(min_offload_rows=12, host_bytes=1 << 20), n_batch=64)
    seen = []
    decode = context.decode
    monkeypatch.setattr(
        context, "decode", lambda rows: (seen.append((len(rows), context.used)), decode(rows))[1]
    )
    first = engine.submit(Request(tuple(b"first"), RANDOM_SAMPLING, 20, ignore_eos=True))
    engine.step()
    engine.step()
    engine.submit(Request(tuple(b"a second, long prompt"), RANDOM_SAMPLING, 20, ignore_eos=True))
    while seen[-1][0] < 21:
        engine.step()
        check_cells(engine, context)
    before = engine.stats.used_cells
    # the pass had only the prompt's rows, in an empty pool; afterwards the cells were restored
    assert seen[-1] == (21, 0)
    engine.step()
    assert (seen[-1], engine.stats.used_cells) == ((2, before), before + 2)
    engine.abort(first)


def check_cells(engine: Engine, context: FakeContext) -> None:
    assert engine.stats.used_cells == context.used
    assert engine.scheduler.offload_store.nbytes <= engine.scheduler.schedule.host_bytes


@pytest.mark.parametrize("seed", range(6))
def test_cancelled_or_dropped_requests_do_not_change_other_answers(seed):
    rng = random.Random(seed)
    all_requests = requests(40, rng)
    min_offload_rows = rng.choice((None, 8))
    engine, context = make_engine(
        Schedule(
            max_gap_seconds=0.05,
            min_offload_rows=min_offload_rows,
            host_bytes=rng.choice((0, 1 << 20)),
        ),
        abort_at=rng.randrange(30),
    )
    result = storm(
        engine,
        all_requests,
        rng,
        cancelled=0.01,
        dropped=0.01,
        check=lambda: check_cells(engine, context),
    )
    ended = {answer.finish for answer in result.answers.values() if answer}
    assert ended <= {"length", "cancelled"}
    for number, answer in result.answers.items():
        if answer and answer.finish == "length":
            assert ids_and_finish(answer) == answer_alone(all_requests[number])
    engine.ledger.evict_idle()
    assert context.used == engine.scheduler.swap.nbytes == 0


def test_a_request_too_long_for_the_pool_ends_and_the_others_continue():
    engine, _ = make_engine(Schedule())
    long = Request(tuple(b"q" * 100), RANDOM_SAMPLING, 60, ignore_eos=True)
    short = [
        Request(tuple(b"ask"), RANDOM_SAMPLING.with_values({"seed": seed}), 20, ignore_eos=True)
        for seed in range(3)
    ]
    result = storm(engine, [*short[:1], long, *short[1:]], random.Random(1)).answers
    assert (result[1].finish, result[1].prompt_tokens, len(result[1].tokens)) == (
        "context_full",
        100,
        128 - 100 + 1,
    )
    assert [ids_and_finish(result[number]) for number in (0, 2, 3)] == [
        answer_alone(request) for request in short
    ]


def test_an_error_in_one_request_does_not_change_other_answers():
    engine, _ = make_engine(Schedule())
    good = Request(tuple(b"fine"), RANDOM_SAMPLING.with_values({"seed": 3}), 12, ignore_eos=True)
    bad = Request(tuple(b"bad!"), RANDOM_SAMPLING, 12, ignore_eos=True)
    ids = [engine.submit(good), engine.submit(bad), engine.submit(good)]
    strategy = engine._live[ids[1]].strategy

    def accept(sequence, rows, pass_seconds):
        raise UserError("the model computes no numbers (NaN)")

    strategy.accept = accept
    while engine.is_busy:
        engine.step()
        engine.check()
    first, failed, last = (engine.pop_answer(number) for number in ids)
    assert (failed.finish, str(failed.error)) == ("failed", "the model computes no numbers (NaN)")
    assert ids_and_finish(first) == ids_and_finish(last) == answer_alone(good)


def test_a_short_prompt_submitted_after_a_long_one_is_answered_in_a_few_steps():
    engine, _ = make_engine(Schedule(max_rows=16), n_ctx=20_000, n_batch=64)
    long = engine.submit(Request(tuple(b"z" * 10_000), RANDOM_SAMPLING, 5, ignore_eos=True))
    engine.step()
    short = engine.submit(Request(tuple(b"y"), RANDOM_SAMPLING, 1, ignore_eos=True))
    for _ in range(2):
        if any(event.sequence == short and event.finish for event in engine.step()):
            break
    assert engine.pop_answer(short).finish == "length"
    engine.abort(long)


def test_a_long_prompt_is_not_starved_by_short_ones():
    engine, _ = make_engine(Schedule(max_rows=16), n_ctx=2000, n_batch=64)
    long = engine.submit(Request(tuple(b"z" * 400), RANDOM_SAMPLING, 1, ignore_eos=True))
    rng, steps = random.Random(0), 0
    while steps < 400 / 4 + 2:
        for _ in range(3):
            engine.submit(
                Request(tuple(rng.choices(b"abcd", k=12)), RANDOM_SAMPLING, 1, ignore_eos=True)
            )
        if any(event.sequence == long and event.finish for event in engine.step()):
            break
        steps += 1
    assert engine.pop_answer(long).finish == "length"


def test_a_request_that_waits_long_enough_runs_before_one_with_a_higher_priority():
    engine, _ = make_engine(Schedule(max_running=1))
    low = engine.submit(Request(tuple(b"p"), RANDOM_SAMPLING, 2, ignore_eos=True))
    ended: list[int] = []
    for step in range(400):
        if step < 300:
            engine.submit(Request(tuple(b"u"), RANDOM_SAMPLING, 2, ignore_eos=True, priority=2))
        ended += [event.sequence for event in engine.step() if event.finish]
        if low in ended:
            break
    assert low in ended[:150]


def test_a_common_prefix_of_prompts_submitted_together_is_computed_once():
    stem = bytes(range(97, 123)) * 4
    engine, context = make_engine(Schedule(), n_ctx=1024, n_batch=32)
    seeds = [RANDOM_SAMPLING.with_values({"seed": seed}) for seed in range(4)]
    all_requests = [
        Request(tuple(stem + bytes([65 + n]) * 5), seeds[n], 3, ignore_eos=True) for n in range(4)
    ]
    result = storm(
        engine,
        all_requests,
        random.Random(0),
        at_once=9,
        check=lambda: check_cells(engine, context),
    ).answers
    assert sum(context.batches) == len(stem) + 4 * 5 + 4 * 2
    assert sorted(result[number].cached_tokens for number in range(4)) == [0, *[len(stem)] * 3]
    assert [ids_and_finish(result[number]) for number in range(4)] == [
        answer_alone(request) for request in all_requests
    ]


def test_a_cached_prompt_is_reused_and_clients_share_it_only_if_allowed():
    stem = b"a system text that both of them begin with, long enough; "
    for shared, found in ((True, len(stem)), (False, 0)):
        engine, _ = make_engine(Schedule(share_prefixes=shared))
        result = storm(
            engine,
            [
                Request(tuple(stem + ending), RANDOM_SAMPLING, 2, ignore_eos=True, client=client)
                for client, ending in (("a", b"1"),)
            ],
            random.Random(0),
        )
        assert result.answers[0].cached_tokens == 0
        other = engine.submit(
            Request(tuple(stem + b"2"), RANDOM_SAMPLING, 2, ignore_eos=True, client="b")
        )
        own = engine.submit(
            Request(tuple(stem + b"3"), RANDOM_SAMPLING, 2, ignore_eos=True, client="a")
        )
        while engine.is_busy:
            engine.step()
        assert engine.pop_answer(own).cached_tokens == len(stem)
        assert engine.pop_answer(other).cached_tokens == found


def test_the_branches_of_a_beam_search_are_shared_only_with_the_same_client():
    stem = tuple(b"a text that somebody searches on from, long enough")
    engine, _ = make_engine(Schedule(share_prefixes=False), n_ctx=256, n_batch=64)
    engine.submit(
        Request(
            stem,
            RANDOM_SAMPLING,
            20,
            ignore_eos=True,
            strategy="beam",
            search=BeamSettings(beams=3),
            client="a",
        )
    )
    for _ in range(4):
        engine.step()
    other = engine.submit(Request((*stem, 1), RANDOM_SAMPLING, 2, ignore_eos=True))
    own = engine.submit(Request((*stem, 2), RANDOM_SAMPLING, 2, ignore_eos=True, client="a"))
    while engine.is_busy:
        engine.step()
        engine.check()
    assert (engine.pop_answer(other).cached_tokens, engine.pop_answer(own).cached_tokens) == (
        0,
        len(stem),
    )


def answer_turn(
    engine: Engine, tokens: tuple[int, ...], seed: int = 0, count: int = 8
) -> tuple[Answer, tuple[int, ...]]:
    """Answer one turn of a conversation. Return the answer, and the prompt of the next turn."""
    sampling = RANDOM_SAMPLING.with_values({"seed": seed})
    number = engine.submit(Request(tokens, sampling, count, ignore_eos=True))
    while engine.is_busy:
        engine.step()
        engine.check()
    answer = engine.pop_answer(number)
    return answer, (*tokens, *(token.id for token in answer.tokens), 1, 2, 3)


@pytest.mark.parametrize("memory", [{}, {"is_recurrent": True}], ids=str)
def test_finished_answers_are_offloaded_and_restored_for_the_next_turn(memory):
    engine, context = make_engine(Schedule(idle_offload="always", host_bytes=1 << 20), **memory)
    conversations = [tuple(bytes([65 + number]) * 40) for number in range(3)]
    for turn in range(3):
        for number, tokens in enumerate(conversations):
            answer, conversations[number] = answer_turn(engine, tokens, number)
            assert answer.cached_tokens == (len(tokens) - 4 if turn else 0)
            assert ids_and_finish(answer) == answer_alone(
                Request(tokens, RANDOM_SAMPLING.with_values({"seed": number}), 8, ignore_eos=True)
            )
            # only the cells of this conversation are in the pool
            assert engine.stats.used_cells == context.used == len(tokens) + 7
    idle_offload = engine.scheduler.idle_offload
    assert len(idle_offload) == 2
    engine.schedule = Schedule(idle_offload="always", host_bytes=1)
    idle_offload.clear_pool()
    assert len(idle_offload) == idle_offload.nbytes == 0
    assert engine.stats.used_cells == context.used > 0  # a state over the budget stays in the pool


def test_only_cells_after_the_shared_prefix_are_offloaded():
    engine, context = make_engine(Schedule(idle_offload="always", host_bytes=1 << 20), n_ctx=256)
    stem = tuple(b"what is said first of all")
    conversations = [(*stem, *bytes([65 + number]) * 30) for number in range(3)]
    for turn in range(3):
        for number, tokens in enumerate(conversations):
            answer, conversations[number] = answer_turn(engine, tokens, number)
            assert answer.cached_tokens == (len(tokens) - 4 if turn else len(stem) if number else 0)
            assert context.used == len(tokens) + 7
    other, _ = answer_turn(engine, tuple(b"something else, which begins otherwise"))
    assert other.cached_tokens == 0  # all three conversations are offloaded
    for number, tokens in enumerate(conversations):
        answer, conversations[number] = answer_turn(engine, tokens, number)
        assert answer.cached_tokens == len(tokens) - 4
