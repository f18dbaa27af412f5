"""The engine: each of many sequences has the text that it has alone."""

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.engine.engine import SINGLE_CONVERSATION, Engine
from llmcli.runtime.engine.schedule import QueueFull, Schedule
from llmcli.runtime.requests.request import Answer, Request, percentile
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import EOS, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})


def engine(context: FakeContext, schedule: Schedule = SINGLE_CONVERSATION) -> Engine:
    model = FakeModel()
    return Engine(context, model, None, schedule=schedule)


def finish(machine: Engine, *ids: int) -> list[Answer]:
    for _ in range(2000):
        if not machine.is_busy:
            return [machine.pop_answer(one) for one in ids]
        machine.step()
    raise AssertionError("it never ended")


def request(text: str, **more) -> Request:
    return Request(tuple(text.encode()), GREEDY, **more)


def test_it_says_what_the_model_says_and_stops_at_the_end_token():
    machine = engine(FakeContext(reply=b"hello"))
    (answer,) = finish(machine, machine.submit(request("ask")))
    assert (answer.text, answer.finish, len(answer.tokens), answer.prompt_tokens) == (
        "hello",
        "stop",
        5,
        3,
    )


def test_max_tokens_stop_strings_and_ignored_ends_are_obeyed():
    machine = engine(FakeContext(reply=b"hello world"))
    (short,) = finish(machine, machine.submit(request("a", max_tokens=3)))
    (cut,) = finish(machine, machine.submit(request("b", stops=(" wo",))))
    (long,) = finish(machine, machine.submit(request("c", ignore_eos=True, max_tokens=20)))
    assert (short.text, short.finish) == ("hel", "length")
    assert (cut.text, cut.finish) == ("hello", "stop")
    assert (len(long.tokens), long.finish) == (20, "length")
    assert EOS not in {token.id for token in long.tokens}


def test_many_sequences_share_passes_and_each_gets_its_own_text():
    context = FakeContext(n_ctx=512, n_seq_max=3, reply=b"the same answer")
    machine = engine(context)
    ids = [
        machine.submit(request(prompt))
        for prompt in ("one", "another", "third one", "waits for its place")
    ]
    assert [answer.text for answer in finish(machine, *ids)] == ["the same answer"] * 4
    assert max(context.batches[1:]) >= 3  # three tokens in one pass
    machine.ledger.check()


@pytest.mark.parametrize("wait", [0, 300, 1500])
def test_whoever_comes_late_does_not_wait_for_all_that_another_client_has_sent_before(
    wait: int,
) -> None:
    machine = engine(FakeContext(n_ctx=2048, n_seq_max=4), Schedule(max_running=4))
    long = {"ignore_eos": True, "max_tokens": 200}
    many = {machine.submit(request(f"{number:03}", client="much", **long)) for number in range(64)}
    over: list[int] = []

    def step() -> None:
        over.extend(event.sequence for event in machine.step() if event.finish)

    for _ in range(wait):
        step()
    before = len(over)
    one = machine.submit(request("one", client="little", **long))
    while one not in over:
        step()
    assert len(over) - before <= 8, "the four that ran, it, and three that were let in beside it"
    assert many.issuperset(over[:-1])


def test_a_client_of_small_priority_waits_long_but_not_for_ever() -> None:
    machine = engine(FakeContext(n_ctx=512, n_seq_max=1), Schedule(max_running=1))
    low = machine.submit(request("low", client="a", priority=-2, ignore_eos=True, max_tokens=20))
    for client in "bc":
        machine.submit(request("high", client=client, ignore_eos=True, max_tokens=20))
    over: list[int] = []
    while low not in over:
        for event in machine.step():
            if event.finish:
                over.append(event.sequence)
                machine.submit(
                    request("more", client="bc"[len(over) % 2], ignore_eos=True, max_tokens=20)
                )
        assert len(over) < 50
    assert len(over) > 3


def test_a_long_prompt_is_cut_into_passes_of_the_batch_size():
    context = FakeContext(n_batch=16)
    machine = engine(context)
    (answer,) = finish(machine, machine.submit(request("x" * 50)))
    assert context.batches[:4] == [16, 16, 16, 2]
    assert answer.text == "hello"


def test_a_second_turn_reuses_the_first():
    machine = engine(FakeContext())
    (first,) = finish(machine, machine.submit(request("tell me")))
    (second,) = finish(machine, machine.submit(request("tell me" + first.text + " and more?")))
    assert second.cached_tokens == len("tell me" + first.text)


def test_a_full_context_ends_the_answer_and_says_so():
    machine = engine(FakeContext(n_ctx=10, reply=b"a very long answer"))
    (answer,) = finish(machine, machine.submit(request("12345")))
    assert answer.finish == "context_full"
    assert answer.text == "a very"[: 10 - 5 + 1]


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_when_the_pool_is_full_the_newest_gives_way_and_goes_on_later(swap):
    context = FakeContext(n_ctx=24, n_seq_max=2, reply=b"0123456789")
    machine = engine(context, Schedule(swap_bytes=swap))
    old, new = machine.submit(request("aaaa")), machine.submit(request("bbbbbbbb"))
    ended, preempted = [], 0
    while machine.is_busy:
        ended += [event.sequence for event in machine.step() if event.finish]
        preempted = max(preempted, machine.stats.n_preempted)
        machine.check()
    assert (ended, preempted) == ([old, new], 1)
    assert [(a.text, a.finish) for a in map(machine.pop_answer, (old, new))] == [
        ("0123456789", "stop")
    ] * 2


def test_a_cancelled_answer_keeps_its_text_and_its_cells():
    machine = engine(FakeContext(reply=b"hello world"))
    one = machine.submit(request("q"))
    for _ in range(4):
        machine.step()
    machine.cancel(one)
    (answer,) = finish(machine, one)
    assert (answer.text, answer.finish) == ("hell", "cancelled")
    machine.ledger.check()
    (again,) = finish(machine, machine.submit(request("q" + "hell")))
    assert again.cached_tokens > 0


def test_an_interrupted_pass_loses_only_itself():
    context = FakeContext(n_batch=16, abort_at=1)
    machine = engine(context)
    one = machine.submit(request("y" * 40))
    machine.step()
    machine.step()  # the second pass is interrupted half way
    machine.ledger.check()
    (answer,) = finish(machine, one)
    assert answer.text == "hello"


def test_who_is_cancelled_after_a_pass_that_was_broken_off_breaks_off_no_other():
    class Watched(FakeContext):
        interrupted = 0

        def interrupt(self) -> None:
            self.interrupted += 1

    context = Watched(n_ctx=2048, n_batch=1024, n_seq_max=2, abort_at=0)
    machine = engine(context)
    one, other = machine.submit(request("y" * 900)), machine.submit(request("q"))
    machine.step()  # broken off
    machine.cancel(one)
    assert context.interrupted == 0
    cancelled, answer = finish(machine, one, other)
    assert (cancelled.finish, answer.text) == ("cancelled", "hello")


def test_the_accounts_of_an_answer_add_up():
    machine = engine(FakeContext())
    (answer,) = finish(machine, machine.submit(request("q", logprobs=True)))
    assert answer.generate_ms == pytest.approx(sum(token.ms for token in answer.tokens[1:]))
    assert answer.tpot_ms == pytest.approx(answer.generate_ms / 4)
    for token in answer.tokens:
        assert token.decode_ms + token.sample_ms <= token.ms * 1.001
        assert token.logprob is not None and token.logprob <= 0


def test_percentiles_are_nearest_rank():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99)] == [50, 90, 99]
    assert percentile([5.0], 0.99) == 5
    assert percentile([], 0.5) == 0


def test_the_fake_keeps_the_real_one_s_promises():
    context = FakeContext()
    context.decode(BatchRows((1, 2), (0, 1), (0, 0), (False, True)))
    with pytest.raises(AssertionError):
        context.decode(BatchRows((3,), (5,), (0,), (True,)))


def test_a_pass_that_fails_is_told_and_the_map_still_agrees_with_the_memory():
    class Failing(FakeContext):
        def decode(self, rows: BatchRows):
            if len(self.batches) == 1:
                self.set_token(0, 1)  # a part of the batch was computed
                self.batches.append(0)
                raise UserError("no memory")
            return super().decode(rows)

    machine = engine(Failing(n_batch=16))
    one = machine.submit(request("z" * 30))
    machine.step()
    with pytest.raises(UserError, match="no memory"):
        machine.step()
    machine.ledger.check()
    assert finish(machine, one)[0].text == "hello"


def test_a_pass_has_as_many_rows_as_its_schedule_allows_and_tokens_of_answers_come_first():
    context = FakeContext(n_ctx=512, n_seq_max=3, n_batch=64)
    machine = engine(context, Schedule(max_rows=10, max_chunk_rows=6))
    one = machine.submit(request("a"))
    machine.step()
    ids = [one, machine.submit(request("x" * 20)), machine.submit(request("y" * 20))]
    machine.step()
    assert context.batches[-1] == 1 + 6 + 3
    assert [answer.text for answer in finish(machine, *ids)] == ["hello"] * 3
    assert max(context.batches) == 10


def test_no_more_run_at_once_than_are_allowed_and_no_more_wait():
    context = FakeContext(n_ctx=512, n_seq_max=4)
    machine = engine(context, Schedule(max_running=2, max_waiting=3))
    ids = [machine.submit(request(prompt)) for prompt in ("a", "b", "c")]
    machine.step()
    load = machine.stats
    assert (load.n_running, load.n_waiting, load.n_preempted, load.prompt_tokens, load.tokens) == (
        2,
        1,
        0,
        2,
        2,
    )
    ids += machine.submit_samples(request("d"), 2)
    with pytest.raises(QueueFull, match="3 requests wait already"):
        machine.submit(request("e"))
    assert [answer.text for answer in finish(machine, *ids)] == ["hello"] * 5
    machine.check()
    assert (machine.stats.n_running, machine.stats.tokens, machine.stats.used_cells) == (
        0,
        25,
        context.used,
    )
    assert max(context.batches) == 2


def test_who_matters_more_goes_first_and_who_runs_nothing_before_who_runs_much():
    machine = engine(FakeContext(n_ctx=512, n_seq_max=2))
    ids = {
        machine.submit(request(name, client=client, priority=priority)): name
        for name, client, priority in (
            ("a", "x", 0),
            ("b", "x", 0),
            ("c", "x", 0),
            ("d", "y", 0),
            ("e", "z", 1),
        )
    }
    ended = []
    while machine.is_busy:
        ended += [ids[event.sequence] for event in machine.step() if event.finish]
    assert ended == ["e", "a", "b", "d", "c"]


@pytest.mark.parametrize(("row", "rows"), [(0.0047, 128), (0.0026, 192), (0.02, 64)])
def test_a_prompt_s_pass_lasts_about_as_long_as_the_gap_between_others_tokens_may(
    row: float, rows: int
) -> None:
    context = FakeContext(n_ctx=2048, n_seq_max=4, n_batch=512)
    machine = engine(context, Schedule(max_gap_seconds=0.5, min_offload_rows=128))
    machine.scheduler.record_pass(64, 64 * row)
    machine.submit(request("a"))
    machine.step()
    machine.submit(request("x" * 400))
    machine.step()
    machine.step()
    assert context.batches[-2:] == [1, rows]


def test_it_is_steady_while_answers_go_on_and_nobody_waits_or_reads() -> None:
    machine = engine(FakeContext(n_ctx=512, n_seq_max=1), Schedule(max_running=1))
    assert machine.is_steady
    machine.submit(request("ask"))
    assert not machine.is_steady
    machine.step()
    assert machine.is_steady
    machine.submit(request("other"))
    assert not machine.is_steady
