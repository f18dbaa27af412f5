"""The pool of models, with processes that load nothing: which requests wait, which models are
unloaded, and the errors of clients.
"""

import asyncio
import json
import math
import random
from pathlib import Path

import pytest

from llmcli.api.errors import ApiError
from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses
from llmcli.serve.processes.front import UpstreamLost
from llmcli.serve.processes.models import model_loads, model_pool, pooled_model
from llmcli.serve.processes.models.pooled_model import LoadAbandoned
from tests.serve.processes.models.fake_processes import MIB, FakeProcess, World, run

BOTH = {"a": 600 * MIB, "b": 700 * MIB}


def test_models_that_do_not_fit_together_take_turns(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        names = ["a", "b"] * 10
        assert await asyncio.gather(*map(world.ask, names)) == names
        assert world.loads == ["a", "b"]  # the requests of each turn are answered together

    run(scenario, tmp_path, BOTH)


def test_a_model_waits_until_the_other_is_idle(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        first = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: world.pool.models["a"].n_running == 1)
        second = asyncio.ensure_future(world.ask("b"))
        await world.until(lambda: world.pool.models["a"].drains_for == "room for b")
        third = asyncio.ensure_future(world.ask("a"))  # it must not overtake the second
        await world.until(lambda: world.pool.models["a"].n_waiting == 1)
        assert world.loads == ["a"]
        world.may_answer.set()
        assert await asyncio.gather(first, second, third) == ["a", "b", "a"]
        assert world.loads == ["a", "b", "a"]

    run(scenario, tmp_path, BOTH)


def test_clients_that_leave_stop_a_load_that_waits(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        first = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: world.pool.models["a"].n_running == 1)
        second = asyncio.ensure_future(world.ask("b"))
        await world.until(lambda: bool(world.pool.models["a"].drains_for))
        second.cancel()
        await world.until(lambda: world.state("b") == "here")
        world.may_answer.set()
        assert await first == "a"
        assert await world.ask("a") == "a"
        assert world.loads == ["a"]  # it needs not make room any more

    run(scenario, tmp_path, BOTH)


def test_the_model_that_was_used_longest_ago_is_unloaded(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for name in ("a", "b", "a", "c"):
            await world.ask(name)
        assert [process.name for process in world.loaded] == ["a", "c"]

    run(scenario, tmp_path, {"a": 300 * MIB, "b": 350 * MIB, "c": 400 * MIB})


def test_a_model_that_is_loaded_again_needs_no_plan_and_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_model, "RETRY_DELAYS_SECONDS", (0.0,))
    monkeypatch.setattr(model_loads, "LOAD_RETRY_SECONDS", (0.0, 0.0))

    async def scenario(world: World) -> None:
        for name in "abab":
            await world.ask(name)
        assert [name for name, _ in world.plans] == ["a", "b"]
        assert [(name, earlier.passes) for name, earlier in world.starts] == [
            ("a", MeasuredPasses({1: 1.0}, 1)),
            ("b", MeasuredPasses({1: 1.0}, 2)),
        ]
        world.files["a"].write_bytes(b"another model")
        await world.ask("a")
        assert [name for name, _ in world.plans] == ["a", "b", "a"]
        world.n_killed_loads = 3
        with pytest.raises(ApiError, match="SIGKILL"):
            await world.ask("b")
        await world.ask("b")
        assert [name for name, _ in world.plans] == ["a", "b", "a", "b"]

    run(scenario, tmp_path, BOTH)


def test_pinned_models_are_loaded_at_the_start_and_stay(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.changes["a"] = {"is_pinned": True}
        await world.pool.refresh()
        assert await world.ask("a", keep_alive=0) == "a"
        with pytest.raises(ApiError, match=r"of which pinned models take 600\.0 MiB") as refusal:
            await world.ask("b")
        assert refusal.value.more["hint"].startswith("--memory-limit 1364M")
        with pytest.raises(ApiError, match="pinned") as refusal:
            await world.pool.unload(world.pool.models["a"])
        assert refusal.value.status == 409
        assert await world.ask("a") == "a"
        assert world.loads == ["a"]

    run(scenario, tmp_path, BOTH)


def test_keep_alive_of_a_request_unloads_its_model(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.ask("a", keep_alive=0)
        await world.until(lambda: world.state("a") == "here")
        await world.ask("a", keep_alive="20ms")
        assert world.state("a") == "loaded"
        await world.until(lambda: world.state("a") == "here")
        await world.ask("a", keep_alive=-1)
        assert math.isinf(world.pool.models["a"].expires_at)
        for wrong in ("soon", [], True, "5 m", 10**400):
            with pytest.raises(ApiError, match="keep_alive"):
                await world.ask("a", keep_alive=wrong)

    run(scenario, tmp_path, BOTH, keep_alive=3600.0)


def test_unload_waits_for_running_requests(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        answer = asyncio.ensure_future(world.ask("a"))
        model = world.pool.models["a"]
        await world.until(lambda: model.n_running == 1)
        unload = asyncio.ensure_future(world.pool.unload(model))
        await world.until(lambda: bool(model.drains_for))
        assert not unload.done()
        world.may_answer.set()
        assert await answer == "a"
        assert await unload
        assert world.state("a") == "here"
        assert not await world.pool.unload(model)

    run(scenario, tmp_path, BOTH)


def test_a_model_that_makes_room_is_unloaded_on_request_also_if_the_room_is_not_needed(
    tmp_path: Path,
) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        answer = asyncio.ensure_future(world.ask("a"))
        model = world.pool.models["a"]
        await world.until(lambda: model.n_running == 1)
        other = asyncio.ensure_future(world.ask("b"))
        await world.until(lambda: model.drains_for == "room for b")
        unload = asyncio.ensure_future(world.pool.unload(model))
        await world.until(lambda: model.drains_for == "a request")
        other.cancel()
        await world.until(lambda: world.state("b") == "here")
        world.may_answer.set()
        assert await answer == "a"
        assert await unload

    run(scenario, tmp_path, BOTH)


def test_at_the_end_loaded_processes_may_save_their_states(tmp_path: Path) -> None:
    processes: list[FakeProcess] = []

    async def scenario(world: World) -> None:
        await asyncio.gather(world.ask("a"), world.ask("b"))
        processes.extend(world.loaded)

    run(scenario, tmp_path, {"a": 300 * MIB, "b": 300 * MIB})
    assert [process.was_aborted for process in processes] == [False, False]


def test_a_removed_file_is_noted_and_its_model_ends_when_idle(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        answer = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: world.pool.models["a"].n_running == 1)
        world.files["a"].unlink()
        with pytest.raises(ApiError, match="there is no model 'a' here") as refusal:
            await world.ask("a")
        assert refusal.value.status == 404
        world.may_answer.set()
        assert await answer == "a"
        await world.until(lambda: world.loaded == [])
        assert any("its process ends when it is idle" in note for note in world.notes)

    run(scenario, tmp_path, BOTH)


def test_a_replaced_file_is_loaded_anew(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.ask("a")
        world.files["a"].write_bytes(b"another model")
        assert await world.ask("a") == "a"
        assert world.loads == ["a", "a"]
        assert any("the file of a was replaced" in note for note in world.notes)

    run(scenario, tmp_path, BOTH)


def test_a_crash_loses_the_requests_of_one_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_model, "RETRY_DELAYS_SECONDS", (0.0, 0.0, 1e6))

    async def scenario(world: World) -> None:
        await world.ask("a")
        world.may_answer.clear()
        answers = [asyncio.ensure_future(world.ask(name)) for name in ("a", "b")]
        await world.until(lambda: all(world.pool.models[name].n_running for name in "ab"))
        world.loaded[0].crash()
        with pytest.raises(UpstreamLost, match="SIGKILL"):
            await answers[0]
        world.may_answer.set()
        assert await answers[1] == "b"
        assert await world.ask("a") == "a"
        assert world.pool.models["a"].n_crashes == 1
        assert world.pool.models["a"].n_failures == 0  # an answer was given since

    run(scenario, tmp_path, {"a": 300 * MIB, "b": 300 * MIB})


def test_a_model_that_fails_again_and_again_is_refused_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_model, "RETRY_DELAYS_SECONDS", (0.0, 0.0, 1e6))

    async def scenario(world: World) -> None:
        world.plan_errors["a"] = "the file is damaged"
        for _ in range(2):
            with pytest.raises(ApiError, match="a is not available: the file is damaged"):
                await world.ask("a")
        assert world.state("a") == "failed"
        del world.plan_errors["a"]
        with pytest.raises(ApiError, match="the file is damaged; it is tried again in") as refusal:
            await world.ask("a")
        assert (refusal.value.status, refusal.value.more["hint"]) == (503, "try this")
        assert await world.ask("b") == "b"
        assert world.notes.count("a: the file is damaged (try this)") == 1

    run(scenario, tmp_path, BOTH)


def test_a_model_whose_process_is_killed_while_it_is_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loads, "LOAD_RETRY_SECONDS", (0.0, 0.0))

    async def scenario(world: World) -> None:
        world.n_killed_loads = 2
        assert await world.ask("a") == "a"
        assert world.pool.models["a"].n_crashes == 2
        world.n_killed_loads = 3
        with pytest.raises(ApiError, match="b is not available: the model's process ended with"):
            await world.ask("b")
        assert world.pool.models["b"].n_crashes == 3
        assert await world.ask("b") == "b"

    run(scenario, tmp_path, BOTH)


def test_a_killed_load_is_not_repeated_without_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loads, "LOAD_RETRY_SECONDS", (0.05, 0.05))

    async def scenario(world: World) -> None:
        world.n_killed_loads = 1
        answer = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: world.pool.models["a"].n_crashes == 1)
        answer.cancel()
        await world.until(lambda: world.state("a") == "here" and answer.done())
        task = world.pool.models["a"].load_task
        assert task is not None
        with pytest.raises(LoadAbandoned):
            await task
        assert world.loads == []
        assert len(world.plans) == 1

    run(scenario, tmp_path, BOTH)


def test_an_abandoned_wait_for_a_process_that_ends_passes_the_turn_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()

    async def slow_serve(self: FakeProcess) -> str:
        await self.ended.wait()
        if self.name == "a":
            await may_end.wait()
        self._leave()
        return ""

    monkeypatch.setattr(FakeProcess, "serve", slow_serve)

    async def scenario(world: World) -> None:
        await world.ask("a", keep_alive=0)
        a = world.pool.models["a"]
        await world.until(lambda: a.state == "unloading")
        again = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: a.n_waiting == 1)
        for _ in range(10):  # it has the turn now
            await asyncio.sleep(0)
        again.cancel()
        assert await world.ask("b") == "b"
        assert a.state == "unloading"
        may_end.set()
        assert await world.ask("a") == "a"

    run(scenario, tmp_path, {"a": 300 * MIB, "b": 300 * MIB})


def test_a_model_that_never_fits_is_an_error_with_the_setting(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(ApiError, match=r"a needs 1\.2 GiB, and all models together") as refusal:
            await world.ask("a")
        assert refusal.value.more["hint"].startswith("--memory-limit 1259M")
        assert await world.ask("b") == "b"

    run(scenario, tmp_path, {"a": 1200 * MIB, "b": 500 * MIB})


def test_a_stream_gets_comments_while_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "PROGRESS_SECONDS", 0.001)

    async def scenario(world: World) -> None:
        world.may_answer.clear()
        first = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: world.pool.models["a"].n_running == 1)
        stream = world.messages("b", stream=True)
        head, comment = await anext(stream), await anext(stream)
        assert head["status"] == 200
        while comment["body"] != b": b is queued\n\n":  # first it is planned
            assert comment["body"] == b": b is loading\n\n"
            comment = await anext(stream)
        assert world.state("b") == "queued"
        world.may_answer.set()
        rest = [message async for message in stream]
        assert rest[-1]["body"] == b"b"
        assert await first == "a"

    run(scenario, tmp_path, BOTH)


@pytest.mark.parametrize("streams", [{}, {"stream": True}, {"stream": False}])
def test_a_stream_of_ollama_gets_spaces_while_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: dict[str, bool]
) -> None:
    monkeypatch.setattr(model_pool, "PROGRESS_SECONDS", 0.001)

    async def scenario(world: World) -> None:
        world.answer = lambda name, _scope, _body: (200, b'{"model": "%s"}\n' % name.encode())
        world.may_answer.clear()
        first = asyncio.ensure_future(world.ask("a"))
        await world.until(lambda: world.pool.models["a"].n_running == 1)
        messages = []

        async def read() -> None:
            async for message in world.messages("b", path="/api/chat", **streams):
                messages.append(message)

        second = asyncio.ensure_future(read())
        await world.until(lambda: world.state("b") == "queued")
        is_stream = streams.get("stream", True)
        if is_stream:
            await world.until(lambda: len(messages) > 3)
        world.may_answer.set()
        await asyncio.gather(first, second)
        raw = b"".join(message.get("body", b"") for message in messages).decode()
        # ollama's clients split a stream into lines and parse each, and refuse empty lines
        assert [json.loads(line) for line in raw.splitlines()] == [{"model": "b"}]
        assert raw.startswith("   ") == is_stream
        if is_stream:
            headers = dict(messages[0]["headers"])
            assert headers[b"content-type"].startswith(b"application/x-ndjson")

    run(scenario, tmp_path, BOTH)


def test_names(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for name in ("one:7b", "ONE:7b", "one:7b:latest", "one", "one:latest"):
            assert await world.ask(name) == "one:7b"
        assert await world.ask("two:latest") == "two:latest"
        for name in ("two:1b", "on", "three"):
            with pytest.raises(ApiError, match="there is no model"):
                await world.ask(name)
        with pytest.raises(ApiError, match="name a model: one:7b, two:latest"):
            await world.ask(None)
        world.files["three"] = tmp_path / "three.gguf"  # pulled while the server runs
        world.files["three"].write_bytes(b"model")
        world.needs["three"] = MIB
        assert await world.ask("three") == "three"

    run(scenario, tmp_path, {"one:7b": MIB, "two:latest": MIB})


@pytest.mark.parametrize("seed", range(8))
def test_every_request_is_answered_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(pooled_model, "RETRY_DELAYS_SECONDS", (0.0,))
    random_numbers = random.Random(seed)
    needs = {name: random_numbers.randint(150, 700) * MIB for name in "abcde"}

    async def ask(world: World, name: str) -> str:
        while True:  # as the front server does
            try:
                return await world.ask(name, keep_alive=random_numbers.choice([0, "1ms", -1]))
            except UpstreamLost:
                continue

    async def scenario(world: World) -> None:
        names = random_numbers.choices("abcde", k=80)
        requests = [asyncio.ensure_future(ask(world, name)) for name in names]
        for _ in range(15):
            for _ in range(random_numbers.randint(1, 60)):
                await asyncio.sleep(0)
            world.check()
            if world.loaded and random_numbers.random() < 0.5:
                random_numbers.choice(world.loaded).crash()
            if random_numbers.random() < 0.2:
                world.may_answer.clear()
            else:
                world.may_answer.set()
        world.may_answer.set()
        assert await asyncio.gather(*requests) == names

    run(scenario, tmp_path, needs)
