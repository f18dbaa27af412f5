"""The engine with a fake model: each of many sequences has the text that it has alone."""

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.engine.engine import SINGLE_CONVERSATION, Engine
from llmcli.runtime.engine.schedule import QueueFull, Schedule
from llmcli.runtime.engine.waiting_queue import FAIR_PASSES
from llmcli.runtime.requests.request import BACKGROUND_PRIORITY, Answer, Request, percentile
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import EOS, FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})


def make_engine(context: FakeContext, schedule: Schedule = SINGLE_CONVERSATION) -> Engine:
    model = FakeModel()
    return Engine(context, model, None, schedule=schedule)


def finish(engine: Engine, *ids: int) -> list[Answer]:
    for _ in range(2000):
        if not engine.is_busy:
            return [engine.pop_answer(number) for number in ids]
        engine.step()
    raise AssertionError("the answers do not end")


def alphabet(tokens: list[int]) -> int:
    return 97 + len(tokens) % 26


def request(text: str, **more) -> Request:
    return Request(tuple(text.encode()), GREEDY, **more)


def test_the_answer_is_the_model_s_text_up_to_the_end_token():
    engine = make_engine(FakeContext(reply=b"hello"))
    (answer,) = finish(engine, engine.submit(request("ask")))
    assert (answer.text, answer.finish, len(answer.tokens), answer.prompt_tokens) == (
        "hello",
        "stop",
        5,
        3,
    )


def test_max_tokens_stop_strings_and_ignored_end_tokens_are_obeyed():
    engine = make_engine(FakeContext(reply=b"hello world"))
    (short,) = finish(engine, engine.submit(request("a", max_tokens=3)))
    (cut,) = finish(engine, engine.submit(request("b", stops=(" wo",))))
    (long,) = finish(engine, engine.submit(request("c", ignore_eos=True, max_tokens=20)))
    assert (short.text, short.finish) == ("hel", "length")
    assert (cut.text, cut.finish) == ("hello", "stop")
    assert (len(long.tokens), long.finish) == (20, "length")
    assert EOS not in {token.id for token in long.tokens}


def test_many_sequences_share_passes_and_each_gets_its_text():
    context = FakeContext(n_ctx=512, n_seq_max=3, reply=b"the same answer")
    engine = make_engine(context)
    ids = [
        engine.submit(request(prompt))
        for prompt in ("one", "another", "third one", "waits for its place")
    ]
    assert [answer.text for answer in finish(engine, *ids)] == ["the same answer"] * 4
    assert max(context.batches[1:]) >= 3  # three tokens in one pass
    engine.ledger.check()


@pytest.mark.parametrize("n_steps", [0, 300, 1500])
def test_a_request_does_not_wait_for_all_earlier_requests_of_another_client(
    n_steps: int,
) -> None:
    engine = make_engine(FakeContext(n_ctx=2048, n_seq_max=4), Schedule(max_running=4))
    long = {"ignore_eos": True, "max_tokens": 200}
    many = {engine.submit(request(f"{number:03}", client="much", **long)) for number in range(64)}
    ended: list[int] = []

    def step() -> None:
        ended.extend(event.sequence for event in engine.step() if event.finish)

    for _ in range(n_steps):
        step()
    before = len(ended)
    late = engine.submit(request("new", client="little", **long))
    while late not in ended:
        step()
    assert len(ended) - before <= 8, "four that ran, this one, and three admitted with it"
    assert many.issuperset(ended[:-1])


def test_a_client_s_first_answer_does_not_wait_for_the_samples_of_another_client() -> None:
    """Without preemption, it would wait until one of the long answers ends."""
    context = FakeContext(n_ctx=4096, n_seq_max=4, reply=alphabet)
    engine = make_engine(context, Schedule(max_running=4, host_bytes=1 << 20))
    samples = engine.submit_samples(
        request("many", client="much", ignore_eos=True, max_tokens=400), 8
    )
    for _ in range(20):
        engine.step()
    late = engine.submit(request("new", client="little", ignore_eos=True, max_tokens=20))
    ended: list[int] = []
    for _ in range(FAIR_PASSES + 30):
        ended += [event.sequence for event in engine.step() if event.finish]
    assert ended == [late]
    engine.check()
    assert engine.scheduler.n_preemptions == 1
    alone = make_engine(FakeContext(n_ctx=4096, n_seq_max=4, reply=alphabet))
    (expected,) = finish(
        alone, alone.submit(request("many", client="much", ignore_eos=True, max_tokens=400))
    )
    assert {answer.text for answer in finish(engine, *samples)} == {expected.text}


def test_clients_with_one_answer_each_are_not_preempted_for_others() -> None:
    engine = make_engine(
        FakeContext(n_ctx=4096, n_seq_max=2, reply=alphabet), Schedule(max_running=2)
    )
    ids = [
        engine.submit(request(client, client=client, ignore_eos=True, max_tokens=300))
        for client in "abc"
    ]
    finish(engine, *ids)
    assert engine.scheduler.n_preemptions == 0


def test_when_the_pool_is_full_a_client_with_one_answer_keeps_it() -> None:
    context = FakeContext(n_ctx=256, n_seq_max=4, reply=alphabet)
    engine = make_engine(context)
    many = [
        engine.submit(request(f"{n}", client="much", ignore_eos=True, max_tokens=120))
        for n in range(3)
    ]
    one = engine.submit(request("one", client="little", ignore_eos=True, max_tokens=120))
    preempted: set[int] = set()
    ended: list[int] = []
    while engine.is_busy:
        ended += [event.sequence for event in engine.step() if event.finish]
        preempted |= {sequence.id for sequence in engine.scheduler.waiting}
    assert preempted and one not in preempted
    assert sorted(ended) == sorted([*many, one])


def test_a_request_of_low_priority_waits_long_but_not_forever() -> None:
    engine = make_engine(FakeContext(n_ctx=512, n_seq_max=1), Schedule(max_running=1))
    low = engine.submit(request("low", client="a", priority=-2, ignore_eos=True, max_tokens=20))
    for client in "bc":
        engine.submit(request("high", client=client, ignore_eos=True, max_tokens=20))
    ended: list[int] = []
    while low not in ended:
        for event in engine.step():
            if event.finish:
                ended.append(event.sequence)
                engine.submit(
                    request("more", client="bc"[len(ended) % 2], ignore_eos=True, max_tokens=20)
                )
        assert len(ended) < 50
    assert len(ended) > 3


def test_a_long_prompt_is_cut_into_passes_of_the_batch_size():
    context = FakeContext(n_batch=16)
    engine = make_engine(context)
    (answer,) = finish(engine, engine.submit(request("x" * 50)))
    assert context.batches[:4] == [16, 16, 16, 2]
    assert answer.text == "hello"


def test_a_second_turn_reuses_the_first():
    engine = make_engine(FakeContext())
    (first,) = finish(engine, engine.submit(request("tell me")))
    (second,) = finish(engine, engine.submit(request("tell me" + first.text + " and more?")))
    assert second.cached_tokens == len("tell me" + first.text)


def test_a_full_context_ends_the_answer_as_context_full():
    engine = make_engine(FakeContext(n_ctx=10, reply=b"a very long answer"))
    (answer,) = finish(engine, engine.submit(request("12345")))
    assert answer.finish == "context_full"
    assert answer.text == "a very"[: 10 - 5 + 1]


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_when_the_pool_is_full_the_youngest_request_is_preempted_and_continued(swap):
    context = FakeContext(n_ctx=24, n_seq_max=2, reply=b"0123456789")
    engine = make_engine(context, Schedule(host_bytes=swap))
    old, new = engine.submit(request("aaaa")), engine.submit(request("bbbbbbbb"))
    ended, preempted = [], 0
    while engine.is_busy:
        ended += [event.sequence for event in engine.step() if event.finish]
        preempted = max(preempted, engine.stats.n_preempted)
        engine.check()
    assert (ended, preempted) == ([old, new], 1)
    assert [(a.text, a.finish) for a in map(engine.pop_answer, (old, new))] == [
        ("0123456789", "stop")
    ] * 2


@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.parametrize("n_running", [1, 3])
def test_background_requests_give_their_slots_to_others(swap: int, n_running: int) -> None:
    context = FakeContext(n_ctx=256, n_seq_max=4, reply=b"0123456789")
    engine = make_engine(context, Schedule(max_running=n_running, host_bytes=swap))
    low = {"priority": BACKGROUND_PRIORITY, "client": "batch"}
    background = [engine.submit(request(f"{n} long ago", **low)) for n in range(4)]
    ended: list[int] = []

    def step() -> None:
        ended.extend(event.sequence for event in engine.step() if event.finish)
        engine.check()

    for _ in range(3):
        step()
    assert engine.stats.n_running == n_running
    others = [engine.submit(request(text)) for text in ("ask", "me", "now", "please")]
    step()
    running = {sequence.id for sequence in engine.scheduler.running.values()}
    assert running == set(others[:n_running])  # at once, and only these
    assert engine.stats.n_preempted == n_running
    while engine.is_busy:
        step()
    assert set(ended[:n_running]) <= set(others)
    assert [engine.pop_answer(number).text for number in background + others] == ["0123456789"] * 8


def test_background_requests_give_their_cells_to_others() -> None:
    context = FakeContext(n_ctx=32, n_seq_max=4, reply=b"0123456789")
    engine = make_engine(context)
    background = engine.submit(request("a" * 16, priority=BACKGROUND_PRIORITY))
    engine.step()
    engine.step()
    other = engine.submit(request("b" * 20))
    ended = []
    while engine.is_busy:
        ended += [event.sequence for event in engine.step() if event.finish]
        engine.check()
    assert ended == [other, background]


def test_background_requests_run_beside_others_while_slots_are_free() -> None:
    engine = make_engine(FakeContext(n_ctx=256, n_seq_max=3, reply=b"0123456789"))
    ids = [engine.submit(request("x", priority=BACKGROUND_PRIORITY)), engine.submit(request("yz"))]
    engine.step()
    assert engine.stats.n_running == 2
    finish(engine, *ids)
    assert engine.scheduler.n_preemptions == 0


def test_a_cancelled_answer_keeps_its_text_and_its_cells():
    engine = make_engine(FakeContext(reply=b"hello world"))
    one = engine.submit(request("q"))
    for _ in range(4):
        engine.step()
    engine.cancel(one)
    (answer,) = finish(engine, one)
    assert (answer.text, answer.finish) == ("hell", "cancelled")
    engine.ledger.check()
    (again,) = finish(engine, engine.submit(request("q" + "hell")))
    assert again.cached_tokens > 0


def test_after_an_interrupted_pass_the_answer_is_complete():
    context = FakeContext(n_batch=16, abort_at=1)
    engine = make_engine(context)
    one = engine.submit(request("y" * 40))
    engine.step()
    engine.step()  # the second pass is interrupted half way
    engine.ledger.check()
    (answer,) = finish(engine, one)
    assert answer.text == "hello"


def test_cancelling_after_an_aborted_pass_does_not_abort_the_next_pass():
    class CountingContext(FakeContext):
        interrupted = 0

        def interrupt(self) -> None:
            self.interrupted += 1

    context = CountingContext(n_ctx=2048, n_batch=1024, n_seq_max=2, abort_at=0)
    engine = make_engine(context)
    one, other = engine.submit(request("y" * 900)), engine.submit(request("q"))
    engine.step()  # the pass is aborted
    engine.cancel(one)
    assert context.interrupted == 0
    cancelled, answer = finish(engine, one, other)
    assert (cancelled.finish, answer.text) == ("cancelled", "hello")


def test_the_times_of_an_answer_add_up():
    engine = make_engine(FakeContext())
    (answer,) = finish(engine, engine.submit(request("q", logprobs=True)))
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


def test_the_fake_context_refuses_a_batch_that_does_not_continue_its_sequence():
    context = FakeContext()
    context.decode(BatchRows((1, 2), (0, 1), (0, 0), (False, True)))
    with pytest.raises(AssertionError):
        context.decode(BatchRows((3,), (5,), (0,), (True,)))


def test_a_failed_pass_raises_its_error_and_the_ledger_agrees_with_the_cache():
    class Failing(FakeContext):
        def decode(self, rows: BatchRows):
            if len(self.batches) == 1:
                self.set_token(0, 1)  # a part of the batch was computed
                self.batches.append(0)
                raise UserError("no memory")
            return super().decode(rows)

    engine = make_engine(Failing(n_batch=16))
    one = engine.submit(request("z" * 30))
    engine.step()
    with pytest.raises(UserError, match="no memory"):
        engine.step()
    engine.ledger.check()
    assert finish(engine, one)[0].text == "hello"


def test_a_pass_has_at_most_the_rows_of_its_schedule_and_answers_get_rows_first():
    context = FakeContext(n_ctx=512, n_seq_max=3, n_batch=64)
    engine = make_engine(context, Schedule(max_rows=10, max_chunk_rows=6))
    one = engine.submit(request("a"))
    engine.step()
    ids = [one, engine.submit(request("x" * 20)), engine.submit(request("y" * 20))]
    engine.step()
    assert context.batches[-1] == 1 + 6 + 3
    assert [answer.text for answer in finish(engine, *ids)] == ["hello"] * 3
    assert max(context.batches) == 10


def test_the_numbers_of_running_and_waiting_requests_are_limited():
    context = FakeContext(n_ctx=512, n_seq_max=4)
    engine = make_engine(context, Schedule(max_running=2, max_waiting=3))
    ids = [engine.submit(request(prompt)) for prompt in ("a", "b", "c")]
    engine.step()
    load = engine.stats
    assert (load.n_running, load.n_waiting, load.n_preempted, load.prompt_tokens, load.tokens) == (
        2,
        1,
        0,
        2,
        2,
    )
    ids += engine.submit_samples(request("d"), 2)
    with pytest.raises(QueueFull, match="3 requests wait already"):
        engine.submit(request("e"))
    assert [answer.text for answer in finish(engine, *ids)] == ["hello"] * 5
    engine.check()
    assert (engine.stats.n_running, engine.stats.tokens, engine.stats.used_cells) == (
        0,
        25,
        context.used,
    )
    assert max(context.batches) == 2


def test_requests_are_ordered_by_priority_and_then_by_the_client_s_running_requests():
    engine = make_engine(FakeContext(n_ctx=512, n_seq_max=2))
    ids = {
        engine.submit(request(name, client=client, priority=priority)): name
        for name, client, priority in (
            ("a", "x", 0),
            ("b", "x", 0),
            ("c", "x", 0),
            ("d", "y", 0),
            ("e", "z", 1),
        )
    }
    ended = []
    while engine.is_busy:
        ended += [ids[event.sequence] for event in engine.step() if event.finish]
    assert ended == ["e", "a", "b", "d", "c"]


@pytest.mark.parametrize(("seconds_per_row", "rows"), [(0.0047, 128), (0.0026, 192), (0.02, 64)])
def test_the_rows_of_a_prompt_s_pass_fit_the_allowed_gap_between_tokens(
    seconds_per_row: float, rows: int
) -> None:
    context = FakeContext(n_ctx=2048, n_seq_max=4, n_batch=512)
    engine = make_engine(context, Schedule(max_gap_seconds=0.5, min_offload_rows=128))
    seconds = 64 * seconds_per_row
    engine.scheduler.record_pass(64, seconds, seconds)
    engine.submit(request("a"))
    engine.step()
    engine.submit(request("x" * 400))
    engine.step()
    engine.step()
    assert context.batches[-2:] == [1, rows]


def test_the_engine_is_steady_while_no_request_waits_and_no_prompt_is_computed() -> None:
    engine = make_engine(FakeContext(n_ctx=512, n_seq_max=1), Schedule(max_running=1))
    assert engine.is_steady
    engine.submit(request("ask"))
    assert not engine.is_steady
    engine.step()
    assert engine.is_steady
    engine.submit(request("other"))
    assert not engine.is_steady
