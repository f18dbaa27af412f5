"""States on disk: a new runner reads what an earlier one has computed, and goes on whatever is wrong
with the folder.
"""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli import atomic_files
from llmcli.errors import UserError
from llmcli.runtime.disk_cache import disk_cache as disk_cache_module
from llmcli.runtime.disk_cache import state_writer
from llmcli.runtime.disk_cache.disk_cache import DiskCache
from llmcli.runtime.disk_cache.entry import Entry
from llmcli.runtime.disk_cache.folder import StateFolder, list_files
from llmcli.runtime.engine.waiting_queue import FAIR_PASSES
from llmcli.runtime.open_disk_cache import open_disk_cache
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.full_disk import full_disk
from tests.quant import tiny_gguf
from tests.runtime.binding.contexts.test_checkpoints import HYBRIDS, convert

GREEDY = default_sampling().with_values({"temp": 0})
QUOTA = 1 << 30
PROMPT = tuple(random.Random(0).choices(range(3, 200), k=120))
N_SAVED = 112  # tokens of its full blocks


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.mamba(tmp_path_factory.mktemp("mamba") / "m.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextmanager
def opened(
    model: Path,
    folder: Path,
    quota: int = QUOTA,
    log: list[str] | None = None,
    slots: int = 2,
    **options: object,
) -> Iterator[tuple[Runner, DiskCache]]:
    """Open a runner with a cache in `folder`. `log`: gets the lines that are reported."""
    settings = {"ctx_size": 512, "threads": 1, "gemm": "ggml", **options}
    lines = [] if log is None else log
    with open_runner(model, RunOptions(**settings), slots=slots) as runner:  # type: ignore[arg-type]
        runner.engine.schedule = replace(runner.engine.schedule, host_bytes=1 << 28)
        with open_disk_cache(runner, folder, quota, lines.append):
            cache = runner.engine.scheduler.disk_cache
            assert cache is not None
            # A busy machine may read a file later than it computes so few tokens. Without measured
            # reads every state is worth reading; a test of the costs sets them.
            cache.loader._record = lambda nbytes, seconds: None
            yield runner, cache
            runner.engine.check()
            cache.loader._pool.submit(lambda: None).result(60)  # after what is still being read
            assert runner.engine.is_busy or (cache.loader.n_open, cache.loader.nbytes) == (0, 0)


def answer(runner: Runner, tokens: tuple[int, ...], count: int = 4, client: str = "") -> Answer:
    request = Request(tokens, GREEDY, count, ignore_eos=True, client=client)
    reply = runner.reply(request)
    list(reply)
    return reply.answer


def ids(found: Answer) -> tuple[int, ...]:
    return tuple(token.id for token in found.tokens)


def save(cache: DiskCache) -> None:
    """Write all that is to be saved."""
    cache.flush(60)
    cache.writer.close(60)
    assert not cache.writer.nbytes


def fill(model: Path, folder: Path, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """Save the state of an answer, and return the answer."""
    with opened(model, folder) as (runner, cache):
        found = ids(answer(runner, prompt))
        save(cache)
    return found


def make_model(name: str, folder: Path) -> Path:
    """Return the file of a tiny random model whose state cannot be cut at every token."""
    if name in HYBRIDS:
        pytest.importorskip("transformers", reason="transformers is not installed")
        return convert(name, folder)
    make: Callable[[Path], Path] = getattr(tiny_gguf, name)
    return make(folder / "m.gguf")


def states(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_a_prompt_is_read_from_disk_after_a_restart(stories_gguf: Path, folder: Path) -> None:
    first = fill(stories_gguf, folder)
    assert len(states(folder)) == 1
    with opened(stories_gguf, folder) as (runner, cache):
        again = answer(runner, PROMPT)
        assert (ids(again), again.cached_tokens, again.disk_tokens) == (first, N_SAVED, N_SAVED)
        third = answer(runner, PROMPT)  # now in memory
        assert (ids(third), third.cached_tokens, third.disk_tokens) == (first, 119, 0)
        save(cache)
        assert (cache.usage.read_tokens, cache.usage.written_bytes) == (N_SAVED, 0)
    assert all(path.stat().st_mode & 0o77 == 0 for path in [*states(folder), *folder.glob("*/")])


@pytest.mark.parametrize(("before", "after"), [("on", "off"), ("off", "on")])
def test_cells_are_usable_with_and_without_flash_attention(
    stories_gguf: Path, folder: Path, before: str, after: str
) -> None:
    with opened(stories_gguf, folder, flash_attn=before) as (runner, cache):
        first = ids(answer(runner, PROMPT, 8))
        save(cache)
    with opened(stories_gguf, folder, flash_attn=after) as (runner, _):
        again = answer(runner, PROMPT, 8)
    assert (ids(again), again.disk_tokens) == (first, N_SAVED)


def test_a_turn_adds_its_tokens_only_and_branches_share_their_beginning(
    stories_gguf: Path, folder: Path
) -> None:
    fill(stories_gguf, folder)
    size = states(folder)[0].stat().st_size
    other = (*PROMPT[:80], *range(3, 103))
    with opened(stories_gguf, folder) as (runner, cache):
        turn = (*PROMPT, *range(3, 83))  # 200 tokens
        assert answer(runner, turn).disk_tokens == N_SAVED
        branch = answer(runner, other)
        assert (branch.cached_tokens, branch.disk_tokens) == (80, 0)
        save(cache)
    sizes = [path.stat().st_size for path in states(folder)]
    assert len(sizes) == 3
    assert max(size_ for size_ in sizes if size_ != size) < size  # neither repeats the beginning
    with opened(stories_gguf, folder) as (runner, _):
        assert answer(runner, (*turn, 7, 8, 9)).disk_tokens >= 192
        # the pool has the first 80 tokens now, and only the rest is read
        branch = answer(runner, (*other, 7))
        assert (branch.cached_tokens, branch.disk_tokens) == (176, 96)


def test_running_answers_do_not_wait_for_a_state(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (runner, cache):
        is_released, read = threading.Event(), cache.folder.read

        def wait(name: str, n_vocab: int) -> object:
            assert is_released.wait(60)
            return read(name, n_vocab)

        monkeypatch.setattr(cache.folder, "read", wait)
        engine = runner.engine
        admission, n_compared = engine.scheduler.admission, 0
        admission.on_prefix_loss = lambda sequence, loss: None
        find_nearest = admission.history.find_nearest

        def count(tokens: tuple[int, ...], scope: str) -> object:
            nonlocal n_compared
            n_compared += 1
            return find_nearest(tokens, scope)

        monkeypatch.setattr(admission.history, "find_nearest", count)
        running = engine.submit(Request((5, 6, 7), GREEDY, 40, ignore_eos=True))
        engine.step()
        reading = engine.submit(Request(PROMPT, GREEDY, 4, ignore_eos=True))
        events = [event for _ in range(20) for event in engine.step()]
        assert len(events) >= 20
        assert {event.sequence for event in events} == {running}
        is_released.set()
        while engine.is_busy:
            engine.step()
        found = engine.pop_answer(reading)
        assert (ids(found), found.disk_tokens) == (first, N_SAVED)
        assert n_compared == 3, "once for each admission, and before the file was read"


class HeldReads:
    """Reads of a cache that wait until they are released, and count."""

    def __init__(self, cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.has_begun, self.is_released = threading.Event(), threading.Event()
        read = cache.folder.read

        def wait(name: str, n_vocab: int) -> object:
            self.names.append(name)
            self.has_begun.set()
            assert self.is_released.wait(60)
            return read(name, n_vocab)

        monkeypatch.setattr(cache.folder, "read", wait)
        # as in a server, whose engine does not wait for the disk
        monkeypatch.setattr(cache.loader, "on_loaded", lambda: None)


def test_a_request_that_needs_no_file_overtakes_one_that_is_read(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        reading = engine.submit(Request(PROMPT, GREEDY, 4, ignore_eos=True))
        assert engine.step() == []
        assert engine.waits_for_disk
        short = engine.submit(Request((5, 6, 7), GREEDY, 3, ignore_eos=True))
        events = [event for _ in range(5) for event in engine.step()]
        assert {event.sequence for event in events} == {short}
        assert events[-1].finish == "length"
        held.is_released.set()
        while engine.is_busy:
            engine.step()
        found = engine.pop_answer(reading)
        assert (ids(found), found.disk_tokens) == (first, N_SAVED)
        assert not engine.waits_for_disk


def test_the_engine_does_not_wait_when_an_answer_has_made_room_for_another(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        engine.schedule = replace(engine.schedule, max_running=1)
        engine.submit(Request(PROMPT, GREEDY, 4, ignore_eos=True))
        engine.step()
        engine.submit(Request((5, 6, 7), GREEDY, 3, ignore_eos=True))
        engine.step()
        waiting = engine.submit(Request((6, 7, 8), GREEDY, 3, ignore_eos=True))
        events = [event for _ in range(2) for event in engine.step()]
        has_slept, found = engine.waits_for_disk, {event.sequence for event in engine.step()}
        held.is_released.set()
        assert events[-1].finish
        assert not has_slept, "the third request can begin"
        assert found == {waiting}
        while engine.is_busy:
            engine.step()


def test_a_request_that_is_cancelled_while_it_is_read_ends_at_once(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache_module, "PART_TOKENS", 64)  # two files
    with opened(stories_gguf, folder, saves_states=True) as (runner, cache):
        answer(runner, PROMPT)
        save(cache)
    assert len(states(folder)) == 2
    with opened(stories_gguf, folder) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        reading = engine.submit(Request(PROMPT, GREEDY, 4, ignore_eos=True))
        engine.step()
        assert held.has_begun.wait(60)
        engine.cancel(reading)
        assert not engine.waits_for_disk, "a step ends it"
        (event,) = engine.step()
        assert (event.sequence, event.finish) == (reading, "cancelled")
        assert engine.ledger.n_idle == 2
        assert cache.loader.n_open == 0
        is_counted = cache.loader.nbytes > 0
        held.is_released.set()
        assert is_counted, "the file is read to its end"
    assert len(held.names) == 1, "the second file is not read"


def test_a_sample_that_shares_a_prompt_ends_its_own_load(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (runner, cache):
        engine = runner.engine
        numbers = engine.submit_samples(Request(PROMPT, GREEDY, 4, ignore_eos=True), 2)
        sample = engine._live[numbers[1]]
        sample.disk_read.load = cache.start_load(PROMPT[:-1], "", 0)
        while engine.is_busy:
            engine.step()
        assert cache.loader.n_open == 0
        assert sample.disk_read.load is None


def test_a_load_keeps_no_state_after_it_was_restored(stories_gguf: Path, folder: Path) -> None:
    fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (_, cache):
        load = cache.start_load(PROMPT[:-1], "", 0)
        assert load is not None
        state = load.future.result(60)
        assert state is not None
        assert load.nbytes >= len(state.state)
        assert cache.restore(load, PROMPT, "") == N_SAVED
        assert load.future.result() is None


def test_the_bytes_of_a_load_include_its_checkpoints(mamba: Path, folder: Path) -> None:
    fill(mamba, folder)
    with opened(mamba, folder) as (_, cache):
        load = cache.start_load((*PROMPT, *range(3, 60)), "", 0)
        assert load is not None
        load.future.result(60)
        assert cache.loader.nbytes == load.nbytes
        cache.loader.end(load)
        assert cache.loader.nbytes == 0


def test_a_leftover_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, {"model": "m"}, 10_000, ())
    folder.open()
    entry = Entry("whole", 0, ((16, bytes(16)),), 2000)
    names = [f".{entry.name}.{number}.part" for number in range(3)]
    for name in names:
        (folder.path / name).write_bytes(b"")
    stuck = names[0]
    (folder.path / stuck).unlink()
    (folder.path / stuck).mkdir()  # not even its owner can unlink it
    other = folder.path.parent / ("f" * len(folder.path.name))
    other.mkdir()
    (other / stuck).write_bytes(b"")
    folder.open()
    assert [path for path in tmp_path.glob("*/.*.part") if path.is_file()] == []


def test_equal_beginnings_are_read_once(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder, slots=4, ctx_size=2048) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        request = Request(PROMPT, GREEDY, 4, ignore_eos=True)
        numbers = [*engine.submit_samples(request, 2), engine.submit(request)]
        for _ in range(3):
            assert engine.step() == []
        held.is_released.set()
        while engine.is_busy:
            engine.step()
        assert [ids(engine.pop_answer(number)) for number in numbers] == [first] * 3
    assert len(held.names) == 1


def test_two_requests_for_one_slot_read_a_file_once(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder, slots=4, ctx_size=2048) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        request = Request(PROMPT, GREEDY, 4, ignore_eos=True, slot=2)
        numbers = [engine.submit(request), engine.submit(request)]
        for _ in range(3):
            assert engine.step() == []
        held.is_released.set()
        while engine.is_busy:
            engine.step()
        assert [ids(engine.pop_answer(number)) for number in numbers] == [first] * 2
    assert len(held.names) == 1


def test_a_read_that_ends_while_requests_are_admitted_serves_both_of_its_slot(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder, slots=4, ctx_size=2048) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        admission = engine.scheduler.admission
        waits = admission._waits_for_prefix
        request = Request(PROMPT, GREEDY, 4, ignore_eos=True, slot=2)
        numbers = [engine.submit(request)]
        assert engine.step() == []

        def end_read(sequence: Sequence) -> bool:
            """End the read when the second request is looked at, after the first one was."""
            if sequence.id == numbers[-1]:
                held.is_released.set()
                for load in admission.loading:
                    load.future.result(60)
            return waits(sequence)

        monkeypatch.setattr(admission, "_waits_for_prefix", end_read)
        numbers.append(engine.submit(request))
        while engine.is_busy:
            engine.step()
        assert [ids(engine.pop_answer(number)) for number in numbers] == [first] * 2
    assert len(held.names) == 1


def test_a_short_request_does_not_wait_for_a_read_of_another(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder, slots=1) as (runner, cache):
        held, engine = HeldReads(cache, monkeypatch), runner.engine
        long = engine.submit(Request(PROMPT, GREEDY, 4, ignore_eos=True))
        assert engine.step() == []
        short = engine.submit(Request((5, 6, 7), GREEDY, 4, ignore_eos=True))
        ended: list[int] = []
        while not ended:
            ended += [event.sequence for event in engine.step() if event.finish]
        assert ended == [short]
        held.is_released.set()
        while engine.is_busy:
            engine.step()
        assert ids(engine.pop_answer(long)) == first


def test_no_answer_is_preempted_for_a_prompt_that_is_being_read(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    with opened(stories_gguf, folder, slots=4, ctx_size=2048) as (runner, cache):
        is_released, read = threading.Event(), cache.folder.read

        def wait(name: str, n_vocab: int) -> object:
            assert is_released.wait(60)
            return read(name, n_vocab)

        monkeypatch.setattr(cache.folder, "read", wait)
        engine = runner.engine
        long = [
            engine.submit(Request((5, 6, 7 + at), GREEDY, 300, ignore_eos=True, client="much"))
            for at in range(4)
        ]
        for _ in range(5):
            engine.step()
        late = engine.submit(Request(PROMPT, GREEDY, 4, ignore_eos=True, client="little"))
        for _ in range(FAIR_PASSES + 40):
            engine.step()
        assert engine.scheduler.n_preemptions == 1
        is_released.set()
        ended: list[int] = []
        while engine.is_busy:
            ended += [event.sequence for event in engine.step() if event.finish]
        assert ended[0] == late
        assert {*ended[1:]} == {*long}
        found = engine.pop_answer(late)
        assert (ids(found), found.disk_tokens) == (first, N_SAVED)


def test_a_part_of_a_slot_is_read_alone_although_all_slots_have_cells(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(stories_gguf, folder, saves_states=True) as (runner, cache):
        spares, read = list[int | None](), type(runner.context).read_range

        def watch(context: object, *where: int | None) -> object:
            spares.append(where[3])
            return read(context, *where)  # type: ignore[arg-type]

        monkeypatch.setattr(type(runner.context), "read_range", watch)
        for number in range(3):  # more than there are slots
            answer(runner, (number + 3, *PROMPT))
        assert all(runner.engine.ledger.tokens)
        save(cache)
    assert spares == [2, 2, 2]
    assert len(states(folder)) == 3


def test_states_without_parts_take_no_spare_sequence(mamba: Path) -> None:
    settings = RunOptions(ctx_size=64, threads=1, gemm="ggml", saves_states=True)
    with open_runner(mamba, settings, slots=2) as runner:
        assert runner.context.spare_sequence is None


def test_a_long_copy_waits_until_no_answer_runs(mamba: Path, folder: Path) -> None:
    with opened(mamba, folder) as (runner, cache):
        answer(runner, PROMPT)
        assert cache.save_part(is_idle=False), "its time is not known before"
        answer(runner, (9, *PROMPT))
        cache.store.costs.byte_seconds = 1.0
        assert not cache.save_part(is_idle=False)
        assert cache.usage.queued_bytes > 0, "the state is still to be written"
        assert cache.save_part(is_idle=True)
        save(cache)
        assert cache.usage.queued_bytes == 0
    assert len(states(folder)) == 2


def test_two_processes_use_one_folder(stories_gguf: Path, folder: Path) -> None:
    with (
        opened(stories_gguf, folder) as (runner, cache),
        opened(stories_gguf, folder) as (other_runner, other),
    ):
        first = ids(answer(runner, PROMPT))
        save(cache)
        found = answer(other_runner, PROMPT)
        assert (ids(found), found.disk_tokens) == (first, N_SAVED)
        save(other)
        assert other.usage.written_bytes == 0
    assert len(states(folder)) == 1


def test_clients_that_share_nothing_share_no_files(stories_gguf: Path, folder: Path) -> None:
    for client, expected in (("a", 0), ("b", 0), ("a", N_SAVED)):
        with opened(stories_gguf, folder) as (runner, cache):
            runner.engine.schedule = replace(runner.engine.schedule, share_prefixes=False)
            assert answer(runner, PROMPT, client=client).disk_tokens == expected
            save(cache)


@pytest.mark.parametrize("cut", [0, 3, 200, -1])
def test_truncated_states_are_deleted(stories_gguf: Path, folder: Path, cut: int) -> None:
    first = fill(stories_gguf, folder)
    (path,) = states(folder)
    path.write_bytes(path.read_bytes()[:cut])
    check_damage(stories_gguf, folder, path, first)


@pytest.mark.parametrize("place", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_flipped_bits_are_noticed(stories_gguf: Path, folder: Path, place: float) -> None:
    first = fill(stories_gguf, folder)
    (path,) = states(folder)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)
    check_damage(stories_gguf, folder, path, first)


def check_damage(model: Path, folder: Path, path: Path, first: tuple[int, ...]) -> None:
    log: list[str] = []
    with opened(model, folder, log=log) as (runner, cache):
        found = answer(runner, PROMPT)
        assert (ids(found), found.cached_tokens) == (first, 0)
        assert not path.exists()
        assert cache.usage.damaged == 1
        save(cache)
        assert path.exists()  # it is written again
    (line,) = log
    assert path.name in line
    with opened(model, folder) as (runner, _):
        assert answer(runner, PROMPT).disk_tokens == N_SAVED


def test_states_under_a_wrong_name_are_not_used(stories_gguf: Path, folder: Path) -> None:
    first = fill(stories_gguf, folder)
    (path,) = states(folder)
    other = (9, *PROMPT[1:])
    fill(stories_gguf, folder, other)
    (foreign,) = set(states(folder)) - {path}
    foreign.replace(path)
    with opened(stories_gguf, folder) as (runner, cache):
        found = answer(runner, PROMPT)
        assert (ids(found), found.cached_tokens, cache.usage.damaged) == (first, 0, 1)


def test_states_of_other_settings_are_not_used(stories_gguf: Path, folder: Path) -> None:
    fill(stories_gguf, folder)
    with opened(stories_gguf, folder, cache_type_k="f32") as (runner, cache):
        assert answer(runner, PROMPT).cached_tokens == 0
        assert not cache.usage.damaged
    (path,) = states(folder)
    (other,) = {found for found in folder.glob("*/") if found != path.parent}
    path.replace(other / path.name)  # even after the file was moved
    with opened(stories_gguf, folder, cache_type_k="f32") as (runner, cache):
        assert answer(runner, PROMPT).cached_tokens == 0
        assert cache.usage.damaged == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no user ids")
def test_states_of_other_users_stay_unread(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stories_gguf, folder)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    log: list[str] = []
    with opened(stories_gguf, folder, log=log) as (runner, cache):
        assert answer(runner, PROMPT).cached_tokens == 0
        save(cache)
    assert len(states(folder)) == 1
    assert any("belongs to another user" in line for line in log)


def test_the_least_recently_used_states_are_dropped(stories_gguf: Path, folder: Path) -> None:
    fill(stories_gguf, folder)
    (oldest,) = states(folder)
    quota = 3 * oldest.stat().st_size + 100
    prompts = [(number, *PROMPT[1:]) for number in range(3, 6)]
    for prompt in prompts[:2]:
        fill(stories_gguf, folder, prompt)
    with opened(stories_gguf, folder, quota) as (runner, cache):
        assert answer(runner, PROMPT).disk_tokens == N_SAVED  # used now
        answer(runner, prompts[2])
        save(cache)
        assert cache.usage.dropped == 1
        assert cache.usage.used_bytes <= quota
    assert sum(path.stat().st_size for path in states(folder)) <= quota
    for prompt, expected in (
        (prompts[0], 0),
        (PROMPT, N_SAVED),
        (prompts[1], N_SAVED),
        (prompts[2], N_SAVED),
    ):
        with opened(stories_gguf, folder, quota) as (runner, _):
            assert answer(runner, prompt).disk_tokens == expected


def test_two_writers_stay_within_the_quota(tmp_path: Path) -> None:
    writers = [StateFolder(tmp_path, {"model": "m"}, 10_000, ()) for _ in range(2)]
    for writer in writers:
        writer.open()
    for number in range(12):
        entry = Entry("whole", 0, ((16, bytes([number] * 16)),), 2000)
        assert writers[number % 2].write(entry, range(16), bytes(2000))
        assert sum(file.nbytes for file in list_files(tmp_path)) <= 10_000
    assert len(list(list_files(tmp_path))) == 4


def test_temporary_files_of_killed_writers_are_deleted_at_the_start(
    stories_gguf: Path, folder: Path
) -> None:
    first = fill(stories_gguf, folder)
    (path,) = states(folder)
    leftover = path.parent / f".{path.name}.0123456789abcdef.part"
    leftover.write_bytes(path.read_bytes()[:-9])
    with opened(stories_gguf, folder) as (runner, _):
        assert not leftover.exists()
        assert ids(answer(runner, PROMPT)) == first


def test_a_quota_below_one_state_is_told_once(stories_gguf: Path, folder: Path) -> None:
    log: list[str] = []
    with opened(stories_gguf, folder, 1000, log) as (runner, cache):
        answer(runner, PROMPT)
        answer(runner, (9, *PROMPT))
        save(cache)
        assert cache.usage.failed == 2
    assert len([line for line in log if "--cache-dir-size" in line]) == 1
    assert not states(folder)


def test_a_full_disk_stops_no_answer(stories_gguf: Path, folder: Path) -> None:
    log: list[str] = []
    with opened(stories_gguf, folder, log=log) as (runner, cache):
        first = ids(answer(runner, PROMPT))
        with full_disk(1000):
            save(cache)
        assert ids(answer(runner, PROMPT)) == first
        assert cache.usage.failed == 1
    assert len(log) == 1
    assert "states of answers are not saved" in log[0]
    assert not list(folder.glob("*/*.kv")) + list(folder.glob("*/.*.part"))


def test_a_bug_of_the_writer_is_told_with_its_trace(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    with opened(stories_gguf, folder, log=log) as (runner, cache):

        def fail(*arguments: object) -> bool:
            raise ZeroDivisionError("injected")

        monkeypatch.setattr(cache.folder, "write", fail)
        first = ids(answer(runner, PROMPT))
        save(cache)
        assert (cache.usage.bugs, cache.usage.failed, cache.usage.is_writing) == (1, 1, False)
        answer(runner, (9, *PROMPT))
        cache.flush(60)
        assert cache.usage.queued_bytes == 0, "nothing is queued for a writer that does not write"
        assert ids(answer(runner, PROMPT)) == first
    (line,) = log
    assert "not saved any more" in line
    assert "Traceback" in line
    assert "ZeroDivisionError: injected" in line
    assert not states(folder)


def test_a_bug_of_the_writer_drops_what_is_queued_behind_it(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    with opened(stories_gguf, folder, log=log) as (runner, cache):
        is_released = threading.Event()

        def fail(names: object) -> None:
            assert is_released.wait(60)
            raise ZeroDivisionError("injected")

        monkeypatch.setattr(cache.folder, "touch", fail)
        cache.writer.touch(["x"])
        answer(runner, PROMPT)
        cache.flush(60)
        assert cache.usage.queued_bytes > 0
        is_released.set()
        save(cache)
        assert (cache.usage.bugs, cache.usage.failed, cache.usage.queued_bytes) == (1, 1, 0)
    assert len(log) == 1


def test_a_bug_of_the_loader_is_told_and_the_prompt_is_computed(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)
    log: list[str] = []
    with opened(stories_gguf, folder, log=log) as (runner, cache):
        with monkeypatch.context() as patch:
            patch.setattr(cache.index, "matches", lambda *arguments: 1 // 0)
            found = answer(runner, PROMPT)
            assert (ids(found), found.disk_tokens, cache.usage.bugs) == (first, 0, 1)
        assert cache.usage.is_writing
        save(cache)
    (line,) = log
    assert "Traceback" in line
    assert "ZeroDivisionError" in line


def test_writing_goes_on_when_the_disk_has_room_again(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(state_writer, "PAUSE_SECONDS", 0.0)
    with opened(stories_gguf, folder, log=log) as (runner, cache):
        answer(runner, PROMPT)
        with full_disk(1000):
            for number in range(2):
                answer(runner, (3 + number, *PROMPT))
                cache.flush(60)
                has_written = threading.Event()
                cache.writer._queue.put(has_written.set)
                assert has_written.wait(60)
        assert len(log) == 1, "told once"
        answer(runner, (9, *PROMPT))
        cache.flush(60)
        has_written = threading.Event()
        cache.writer._queue.put(has_written.set)
        assert has_written.wait(60)
        assert cache.usage.written_bytes > 0
        assert not cache.usage.bugs
        with full_disk(1000):
            answer(runner, (11, *PROMPT))
            save(cache)
        assert len(log) == 2, "the second full disk is reported, too"


def test_a_read_only_folder_is_read(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(stories_gguf, folder)

    def refuse(path: Path, permissions: int = 0) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(atomic_files, "create_temporary", refuse)
    log: list[str] = []
    with opened(stories_gguf, folder, log=log) as (runner, cache):
        found = answer(runner, PROMPT)
        assert (ids(found), found.disk_tokens) == (first, N_SAVED)
        answer(runner, (9, *PROMPT))
        save(cache)
        assert cache.usage.failed == 1
    assert len(log) == 1
    assert os.strerror(errno.EROFS) in log[0]


def test_a_folder_that_cannot_be_made_is_told(stories_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log: list[str] = []
    with opened(stories_gguf, tmp_path / "file" / "cache", log=log) as (runner, cache):
        assert len(answer(runner, PROMPT).tokens) == 4
        save(cache)
    assert len(log) == 1
    assert "cannot write" in log[0]


def test_a_folder_that_is_removed_is_made_again(stories_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (runner, cache):
        cache.index.refresh()
        shutil.rmtree(folder)
        assert answer(runner, PROMPT).cached_tokens == 0
        save(cache)
    assert len(states(folder)) == 1
    assert len(list(folder.glob("*/model.json"))) == 1


@pytest.mark.parametrize("name", ["mamba", "gemma3", *HYBRIDS])
def test_states_that_have_no_parts_are_saved_as_a_whole(name: str, tmp_path: Path) -> None:
    model, folder = make_model(name, tmp_path), tmp_path / "cache"
    with opened(model, folder) as (runner, cache):
        first = ids(answer(runner, PROMPT))
        fresh = ids(answer(runner, (*PROMPT, *first, 7, 8)))
    with opened(model, folder) as (runner, cache):
        answer(runner, PROMPT)
        save(cache)
    assert [path.name.split(".")[1] for path in states(folder)] == ["whole"]
    with opened(model, folder) as (runner, _):
        turn = answer(runner, (*PROMPT, *first, 7, 8))
        assert ids(turn) == fresh
        assert turn.disk_tokens == len(PROMPT) + len(first) - 1


@pytest.mark.parametrize("name", ["mamba", "gemma3", *HYBRIDS])
def test_two_prompts_extend_one_whole_state_at_once(name: str, tmp_path: Path) -> None:
    model, folder = make_model(name, tmp_path), tmp_path / "cache"
    first = fill(model, folder)
    text = (*PROMPT, *first)
    with opened(model, tmp_path / "none") as (runner, _):
        fresh = [ids(answer(runner, (*text, 7 + at, 8))) for at in range(2)]
    with opened(model, folder) as (runner, _):  # the state is in no slot
        engine = runner.engine
        requests = [Request((*text, 7 + at, 8), GREEDY, 4, ignore_eos=True) for at in range(2)]
        numbers = [engine.submit(request) for request in requests]
        while engine.is_busy:
            engine.step()
        found = [engine.pop_answer(number) for number in numbers]
        assert {each.slot for each in found} == {0, 1}
        assert [ids(each) for each in found] == fresh
        # the second one gets it from the checkpoint of the first
        assert [each.cached_tokens for each in found] == [len(text) - 1] * 2
        assert found[0].disk_tokens == len(text) - 1


@pytest.mark.parametrize("name", ["mamba", "gemma3", *HYBRIDS])
def test_the_longest_whole_state_that_a_prompt_extends_is_read(name: str, tmp_path: Path) -> None:
    model, folder = make_model(name, tmp_path), tmp_path / "cache"
    fill(model, folder, PROMPT[:60])
    first = fill(model, folder, PROMPT)
    fill(model, folder, (*PROMPT, 9, *range(3, 40)))  # it goes on otherwise
    turn = (*PROMPT, *first, *range(50, 60))
    with opened(model, tmp_path / "none") as (runner, _):
        fresh = ids(answer(runner, turn))
    with opened(model, folder) as (runner, _):
        found = answer(runner, turn)
        assert (ids(found), found.disk_tokens) == (fresh, len(PROMPT) + len(first) - 1)


@pytest.mark.parametrize("name", ["stories", "mamba", "gemma3"])
def test_a_named_slot_gets_its_state_from_the_disk(
    name: str, stories_gguf: Path, tmp_path: Path
) -> None:
    model = stories_gguf if name == "stories" else make_model(name, tmp_path)
    folder = tmp_path / "cache"
    first = fill(model, folder)
    turn = (*PROMPT, *first, *range(50, 90))
    with opened(model, tmp_path / "none") as (runner, _):
        fresh = ids(answer(runner, turn))
    with opened(model, folder) as (runner, cache):
        answer(runner, (*PROMPT[:8], *range(100, 140)))  # another conversation with this beginning
        for slot in (1, 0):
            request = Request(turn, GREEDY, 4, ignore_eos=True, slot=slot)
            reply = runner.reply(request)
            list(reply)
            found = reply.answer
            assert (ids(found), found.slot) == (fresh, slot)
            assert found.disk_tokens >= N_SAVED - 8
            assert found.cached_tokens >= N_SAVED
        n_read = cache.usage.read_bytes
        longer = (*turn, *fresh, *range(90, 150))
        request = Request(longer, GREEDY, 4, ignore_eos=True, slot=0)
        reply = runner.reply(request)
        list(reply)
        assert (reply.answer.disk_tokens, reply.answer.cached_tokens) == (0, len(turn) + 3)
        assert cache.usage.read_bytes == n_read, "nothing is read for what the slot has"


def test_a_damaged_whole_state_is_deleted(mamba: Path, folder: Path) -> None:
    first = fill(mamba, folder)
    (path,) = states(folder)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with opened(mamba, folder) as (runner, cache):
        found = answer(runner, (*PROMPT, *first, 7))
        assert (found.cached_tokens, cache.usage.damaged) == (0, 1)
    assert not path.exists()


def test_a_state_that_is_slower_to_read_than_to_compute_is_not_read(
    stories_gguf: Path, folder: Path
) -> None:
    fill(stories_gguf, folder)
    with opened(stories_gguf, folder) as (runner, cache):
        cache._byte_seconds = 1.0
        cache.store.costs.token_seconds = 0.001
        assert answer(runner, PROMPT).cached_tokens == 0


def test_the_queue_of_the_writer_is_bounded(
    stories_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache_module, "MAX_QUEUED_BYTES", 1)
    monkeypatch.setattr(disk_cache_module, "PART_TOKENS", 16)
    with opened(stories_gguf, folder) as (runner, cache):
        answer(runner, PROMPT)
        most, enqueue = 0, cache.writer.enqueue

        def watch(job: disk_cache_module.WriteJob) -> None:
            nonlocal most
            enqueue(job)
            most = max(most, cache.store.other_bytes())

        monkeypatch.setattr(cache.writer, "enqueue", watch)
        save(cache)
        # a slot that is read as a whole is one part; otherwise each part waits for the one before
        assert most <= cache.usage.written_bytes // max(1, len(states(folder))) + 4096
    with opened(stories_gguf, folder) as (runner, _):
        assert answer(runner, PROMPT).disk_tokens == N_SAVED


def test_the_reproducible_mode_has_no_cache_on_disk(stories_gguf: Path, folder: Path) -> None:
    with open_runner(stories_gguf, RunOptions(ctx_size=64, threads=1)) as runner:
        runner.options = replace(runner.options, reproducible=True)
        with (
            pytest.raises(UserError, match="--reproducible"),
            open_disk_cache(runner, folder, QUOTA, print),
        ):
            pass
