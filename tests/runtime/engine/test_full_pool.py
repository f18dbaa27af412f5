"""A cell pool that is too small: every request has the answer that it has alone."""

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

WILD = default_sampling().with_values({"temp": 6, "top_k": 0, "top_p": 1, "min_p": 0})
STEMS = (b"the system says what is to be done and how; ", b"another one; ", b"")


def engine(schedule: Schedule, keeps: bool = True, **more) -> tuple[Engine, FakeContext]:
    model = FakeModel()
    context = FakeContext(
        **{"n_ctx": 128, "n_seq_max": 6, "n_batch": 24, "reply": lambda tokens: ord("a"), **more}
    )
    return Engine(
        context,
        model,
        None,
        None,
        keeps,
        schedule,
    ), context


def requests(count: int, rng: random.Random, beams: bool = True) -> list[Request]:
    made = []
    for _ in range(count):
        prompt = rng.choice(STEMS) + bytes(rng.choices(b"xyz", k=rng.randint(1, 30)))
        sampling = WILD.with_values({"seed": rng.randrange(1000)})
        more = (
            {"strategy": "beam", "search": BeamSettings(beams=3)}
            if beams and rng.random() < 0.1
            else {}
        )
        made.append(
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
    return made


def said(answer: Answer) -> tuple[list[int], str]:
    return [token.id for token in answer.tokens], answer.finish


def alone(request: Request) -> tuple[list[int], str]:
    machine, _ = engine(Schedule())
    return said(storm(machine, [request], random.Random(0)).answers[0])


@pytest.mark.parametrize(
    ("memory", "schedule"),
    [
        ({}, Schedule(max_gap_seconds=0.05)),
        ({}, Schedule(max_running=4, max_chunk_rows=8, swap_bytes=0)),
        ({}, Schedule(share_prefixes=False, max_rows=16)),
        ({"is_recurrent": True}, Schedule()),
        ({"n_swa": 24}, Schedule(max_gap_seconds=0.05)),
        ({}, Schedule(max_idle_cells=20)),
        ({}, Schedule(min_offload_rows=8)),
        ({}, Schedule(min_offload_rows=4, max_gap_seconds=0.05, swap_bytes=200)),
        ({"n_swa": 24}, Schedule(min_offload_rows=8)),
    ],
    ids=str,
)
def test_in_a_full_pool_everybody_says_what_they_would_say_alone_and_nobody_fails(memory, schedule):
    rng = random.Random(str(memory))
    asked = requests(50, rng, beams=not memory)
    machine, context = engine(schedule, **memory)
    made = storm(machine, asked, rng, check=lambda: _agree(machine, context))
    assert made.preempted
    assert [said(made.answers[number]) for number in range(50)] == [
        alone(request) for request in asked
    ]
    machine.ledger.evict_idle()
    assert machine.stats.used_cells == context.used == machine.scheduler.swap.nbytes == 0


@pytest.mark.parametrize("whole", [True, False])
def test_where_nothing_is_forgotten_while_others_go_on_everybody_ends_too(whole):
    rng = random.Random(2)
    asked = requests(20, rng, beams=False)
    machine, context = engine(Schedule(), keeps=False, has_complete_states=whole)
    made = storm(machine, asked, rng, check=lambda: _agree(machine, context))
    assert made.preempted
    assert [said(made.answers[number]) for number in range(20)] == [
        alone(request) for request in asked
    ]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_samples_of_one_prompt_say_each_what_its_seed_says_alone(seed, keeps):
    """Some give way before the first of them has read the prompt, begin on their own, and give way
    again.
    """
    rng = random.Random(seed)
    machine, context = engine(Schedule(max_chunk_rows=8), keeps)
    left, ids, expected, answers = requests(24, rng, beams=False), [], [], {}
    while left or machine.is_busy:
        for request in [left.pop() for _ in range(min(len(left), rng.randrange(3)))]:
            count = rng.randint(1, 4)
            ids += machine.submit_samples(request, count)
            seeds = range(request.sampling["seed"], request.sampling["seed"] + count)
            expected += [
                alone(replace(request, sampling=WILD.with_values({"seed": one}))) for one in seeds
            ]
        for event in machine.step():
            if event.finish:
                answers[event.sequence] = said(machine.pop_answer(event.sequence))
        machine.check()
        _agree(machine, context)
    assert machine.stats.n_preemptions
    assert [answers[one] for one in ids] == expected
    assert machine.scheduler.swap.nbytes == 0


def test_who_stepped_aside_and_cannot_come_back_is_computed_anew(monkeypatch):
    rng = random.Random(11)
    asked = requests(12, rng, beams=False)
    machine, context = engine(Schedule(min_offload_rows=4))
    refused: list[int] = []
    monkeypatch.setattr(context, "write_state", lambda slot, *_, **__: bool(refused.append(slot)))
    made = storm(machine, asked, rng, check=lambda: _agree(machine, context))
    assert refused
    assert [said(made.answers[number]) for number in range(len(asked))] == [
        alone(request) for request in asked
    ]


def test_a_long_prompt_is_computed_without_the_cells_of_answers_that_go_on(monkeypatch):
    machine, context = engine(Schedule(min_offload_rows=12), n_batch=64)
    seen = []
    decode = context.decode
    monkeypatch.setattr(
        context, "decode", lambda rows: (seen.append((len(rows), context.used)), decode(rows))[1]
    )
    first = machine.submit(Request(tuple(b"first"), WILD, 20, ignore_eos=True))
    machine.step()
    machine.step()
    machine.submit(Request(tuple(b"a second, long prompt"), WILD, 20, ignore_eos=True))
    while seen[-1][0] < 21:
        machine.step()
        _agree(machine, context)
    before = machine.stats.used_cells
    assert seen[-1] == (21, 0)  # alone, in a pool without the first's cells, which are back
    machine.step()
    assert (seen[-1], machine.stats.used_cells) == ((2, before), before + 2)
    machine.abort(first)


def _agree(machine: Engine, context: FakeContext) -> None:
    assert machine.stats.used_cells == context.used
    assert machine.scheduler.offload_store.nbytes <= machine.scheduler.schedule.offload_bytes


@pytest.mark.parametrize("seed", range(6))
def test_who_is_cancelled_or_dropped_takes_nobody_along(seed):
    rng = random.Random(seed)
    asked = requests(40, rng)
    aside = rng.choice((None, 8))
    machine, context = engine(
        Schedule(max_gap_seconds=0.05, min_offload_rows=aside), abort_at=rng.randrange(30)
    )
    made = storm(
        machine, asked, rng, cancelled=0.01, dropped=0.01, check=lambda: _agree(machine, context)
    )
    ended = {answer.finish for answer in made.answers.values() if answer}
    assert ended <= {"length", "cancelled"}
    for number, answer in made.answers.items():
        if answer and answer.finish == "length":
            assert said(answer) == alone(asked[number])
    machine.ledger.evict_idle()
    assert context.used == machine.scheduler.swap.nbytes == 0


def test_what_is_too_long_for_the_pool_by_itself_ends_with_its_numbers_and_the_others_go_on():
    machine, _ = engine(Schedule())
    long = Request(tuple(b"q" * 100), WILD, 60, ignore_eos=True)
    short = [
        Request(tuple(b"ask"), WILD.with_values({"seed": seed}), 20, ignore_eos=True)
        for seed in range(3)
    ]
    made = storm(machine, [*short[:1], long, *short[1:]], random.Random(1)).answers
    assert (made[1].finish, made[1].prompt_tokens, len(made[1].tokens)) == (
        "context_full",
        100,
        128 - 100 + 1,
    )
    assert [said(made[number]) for number in (0, 2, 3)] == [alone(request) for request in short]


def test_a_poisoned_request_fails_alone():
    machine, _ = engine(Schedule())
    good = Request(tuple(b"fine"), WILD.with_values({"seed": 3}), 12, ignore_eos=True)
    bad = Request(tuple(b"bad!"), WILD, 12, ignore_eos=True)
    ids = [machine.submit(good), machine.submit(bad), machine.submit(good)]
    strategy = machine._live[ids[1]].strategy

    def accept(sequence, rows, spent):
        raise UserError("the model computes no numbers (NaN)")

    strategy.accept = accept
    while machine.is_busy:
        machine.step()
        machine.check()
    first, failed, last = (machine.pop_answer(one) for one in ids)
    assert (failed.finish, str(failed.error)) == ("failed", "the model computes no numbers (NaN)")
    assert said(first) == said(last) == alone(good)


def test_a_short_question_behind_a_long_prompt_is_answered_in_a_few_steps():
    machine, _ = engine(Schedule(max_rows=16), n_ctx=20_000, n_batch=64)
    long = machine.submit(Request(tuple(b"z" * 10_000), WILD, 5, ignore_eos=True))
    machine.step()
    short = machine.submit(Request(tuple(b"y"), WILD, 1, ignore_eos=True))
    for _ in range(2):
        if any(event.sequence == short and event.finish for event in machine.step()):
            break
    assert machine.pop_answer(short).finish == "length"
    machine.abort(long)


def test_the_long_prompt_is_not_starved_by_short_ones():
    machine, _ = engine(Schedule(max_rows=16), n_ctx=2000, n_batch=64)
    long = machine.submit(Request(tuple(b"z" * 400), WILD, 1, ignore_eos=True))
    rng, steps = random.Random(0), 0
    while steps < 400 / 4 + 2:
        for _ in range(3):
            machine.submit(Request(tuple(rng.choices(b"abcd", k=12)), WILD, 1, ignore_eos=True))
        if any(event.sequence == long and event.finish for event in machine.step()):
            break
        steps += 1
    assert machine.pop_answer(long).finish == "length"


def test_who_waits_long_enough_goes_before_a_larger_priority():
    machine, _ = engine(Schedule(max_running=1))
    patient = machine.submit(Request(tuple(b"p"), WILD, 2, ignore_eos=True))
    ended: list[int] = []
    for step in range(400):
        if step < 300:
            machine.submit(Request(tuple(b"u"), WILD, 2, ignore_eos=True, priority=2))
        ended += [event.sequence for event in machine.step() if event.finish]
        if patient in ended:
            break
    assert patient in ended[:150]


def test_prompts_that_begin_alike_are_computed_once_even_where_they_come_together():
    stem = bytes(range(97, 123)) * 4
    machine, context = engine(Schedule(), n_ctx=1024, n_batch=32)
    seeds = [WILD.with_values({"seed": seed}) for seed in range(4)]
    asked = [
        Request(tuple(stem + bytes([65 + n]) * 5), seeds[n], 3, ignore_eos=True) for n in range(4)
    ]
    made = storm(
        machine, asked, random.Random(0), at_once=9, check=lambda: _agree(machine, context)
    ).answers
    assert sum(context.batches) == len(stem) + 4 * 5 + 4 * 2
    assert sorted(made[number].cached_tokens for number in range(4)) == [0, *[len(stem)] * 3]
    assert [said(made[number]) for number in range(4)] == [alone(request) for request in asked]


def test_a_finished_prompt_is_found_again_and_clients_share_only_where_they_may():
    stem = b"a system text that both of them begin with, long enough; "
    for shared, found in ((True, len(stem)), (False, 0)):
        machine, _ = engine(Schedule(share_prefixes=shared))
        made = storm(
            machine,
            [
                Request(tuple(stem + mine), WILD, 2, ignore_eos=True, client=client)
                for client, mine in (("a", b"1"),)
            ],
            random.Random(0),
        )
        assert made.answers[0].cached_tokens == 0
        other = machine.submit(Request(tuple(stem + b"2"), WILD, 2, ignore_eos=True, client="b"))
        own = machine.submit(Request(tuple(stem + b"3"), WILD, 2, ignore_eos=True, client="a"))
        while machine.is_busy:
            machine.step()
        assert machine.pop_answer(own).cached_tokens == len(stem)
        assert machine.pop_answer(other).cached_tokens == found


def test_what_a_search_branches_into_is_its_own_clients_alone():
    stem = tuple(b"a text that somebody searches on from, long enough")
    machine, _ = engine(Schedule(share_prefixes=False), n_ctx=256, n_batch=64)
    machine.submit(
        Request(
            stem,
            WILD,
            20,
            ignore_eos=True,
            strategy="beam",
            search=BeamSettings(beams=3),
            client="a",
        )
    )
    for _ in range(4):
        machine.step()
    other = machine.submit(Request((*stem, 1), WILD, 2, ignore_eos=True))
    own = machine.submit(Request((*stem, 2), WILD, 2, ignore_eos=True, client="a"))
    while machine.is_busy:
        machine.step()
        machine.check()
    assert (machine.pop_answer(other).cached_tokens, machine.pop_answer(own).cached_tokens) == (
        0,
        len(stem),
    )


def talk(
    machine: Engine, tokens: tuple[int, ...], seed: int = 0, count: int = 8
) -> tuple[Answer, tuple[int, ...]]:
    """An answer, and what its conversation goes on with."""
    one = machine.submit(Request(tokens, WILD.with_values({"seed": seed}), count, ignore_eos=True))
    while machine.is_busy:
        machine.step()
        machine.check()
    answer = machine.pop_answer(one)
    return answer, (*tokens, *(token.id for token in answer.tokens), 1, 2, 3)


@pytest.mark.parametrize("memory", [{}, {"is_recurrent": True}], ids=str)
def test_what_finished_answers_leave_lies_outside_the_pool_and_comes_back_for_who_goes_on(memory):
    machine, context = engine(Schedule(max_idle_cells=10), **memory)
    talks = [tuple(bytes([65 + number]) * 40) for number in range(3)]
    for turn in range(3):
        for number, tokens in enumerate(talks):
            answer, talks[number] = talk(machine, tokens, number)
            assert answer.cached_tokens == (len(tokens) - 4 if turn else 0)
            assert said(answer) == alone(
                Request(tokens, WILD.with_values({"seed": number}), 8, ignore_eos=True)
            )
            assert (
                machine.stats.used_cells == context.used == len(tokens) + 7
            )  # its own, for whoever goes on
    parking = machine.scheduler.idle_offload
    assert len(parking) == 2
    machine.schedule = Schedule(max_idle_cells=10, swap_bytes=1)
    parking.offload_idle(0)
    assert len(parking) == parking.nbytes == 0
    assert machine.stats.used_cells == context.used > 0  # what is too long to be kept stays


def test_what_all_begin_with_stays_and_only_ends_are_taken_out():
    machine, context = engine(Schedule(max_idle_cells=0), n_ctx=256)
    stem = tuple(b"what is said first of all")
    talks = [(*stem, *bytes([65 + number]) * 30) for number in range(3)]
    for turn in range(3):
        for number, tokens in enumerate(talks):
            answer, talks[number] = talk(machine, tokens, number)
            assert answer.cached_tokens == (len(tokens) - 4 if turn else len(stem) if number else 0)
            assert context.used == len(tokens) + 7
    other, _ = talk(machine, tuple(b"something else, which begins otherwise"))
    assert other.cached_tokens == 0  # all three are out, and the stem with the last
    for number, tokens in enumerate(talks):
        answer, talks[number] = talk(machine, tokens, number)
        assert answer.cached_tokens == len(tokens) - 4
