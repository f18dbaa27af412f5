"""Fairness between clients: which model is loaded next, and how long a client waits. Time is counted
in turns, so that no clock is needed.
"""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmcli.serve.processes.models.load_turns import LoadTurns, Ticket, choose_tickets
from llmcli.serve.processes.models.pooled_model import ROUNDS_OF_A_TURN
from tests.serve.processes.models.fake_processes import MIB, FakeProcess, World, run

ALONE = 700 * MIB  # two such models do not fit together


@dataclass(eq=False)
class Model:
    """A model for which requests wait."""

    name: str
    tickets: list[Ticket] = field(default_factory=list)
    is_ready: bool = False


class Line:
    """Models that wait for their turns, each of which is a step of the test."""

    def __init__(self) -> None:
        self.turns, self.order = LoadTurns(), list[str]()
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self, name: str, client: str) -> asyncio.Task[None]:
        model = Model(name)
        model.tickets.append(self.turns.make_ticket(client))
        self.tasks.append(asyncio.ensure_future(self._take(model)))
        await asyncio.sleep(0)  # let it wait
        return self.tasks[-1]

    async def _take(self, model: Model) -> None:
        async with self.turns.turn(model):
            self.order.append(model.name)
            model.tickets.clear()

    async def finish(self) -> list[str]:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.order


def test_a_client_with_many_models_does_not_delay_that_of_another() -> None:
    async def main() -> None:
        line = Line()
        async with line.turns.turn(Model("now", [line.turns.make_ticket("x")])):
            for number in range(20):
                await line.add(f"x{number}", "x")
            await line.add("y", "y")
            await line.add("z", "z")
        order = await line.finish()
        # x has the turn now, so that y and z are next; then x goes on in the order of arrival
        assert order == ["y", "z", *(f"x{number}" for number in range(20))]

    asyncio.run(main())


def test_new_clients_do_not_overtake_for_ever() -> None:
    async def main() -> None:
        line = Line()
        holder = Model("now", [line.turns.make_ticket("old")])
        async with line.turns.turn(holder):
            await line.add("old", "old")
            for number in range(3):
                await line.add(f"new{number}", f"new{number}")
            holder.tickets.clear()
        order = await line.finish()
        assert order.index("old") <= 3

        late = Line()
        async with late.turns.turn(Model("now", [late.turns.make_ticket("x")])):
            await late.add("y", "y")
        async with late.turns.turn(Model("now", [late.turns.make_ticket("x")])):
            await late.add("fresh", "fresh")
        assert (await late.finish())[0] == "y"

    asyncio.run(main())


def test_a_canceled_wait_passes_the_turn_on() -> None:
    async def main() -> None:
        line = Line()
        async with line.turns.turn(Model("now")):
            first, second = await line.add("a", "x"), await line.add("b", "y")
            await line.add("c", "z")
            first.cancel()
            await asyncio.sleep(0)
        second.cancel()  # the turn was given just now
        assert await line.finish() == ["c"]

    asyncio.run(main())


def test_only_other_clients_that_wait_for_another_model_limit_a_turn() -> None:
    async def main() -> None:
        line = Line()
        holder = Model("now", [line.turns.make_ticket("x")])
        async with line.turns.turn(holder):
            assert not line.turns.is_contended(holder)
            await line.add("a", "x")
            assert not line.turns.is_contended(holder)
            await line.add("b", "y")
            assert line.turns.is_contended(holder)
        await line.finish()
        assert not line.turns.is_contended(Model("d"))

    asyncio.run(main())


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 5, 9])
def test_few_places_are_dealt_out_to_the_clients(count: int) -> None:
    async def main() -> None:
        turns = LoadTurns()
        tickets = [turns.make_ticket(client) for client in "xxxxyz"]
        chosen = choose_tickets(tickets, Counter({"z": 1}), count)
        clients = "".join(ticket.client for ticket in chosen)
        # all have a place if there are enough, in the order of their arrival
        assert clients == ("xyxzxx"[: max(0, count)] if count < len(tickets) else "xxxxyz")

    asyncio.run(main())


def test_many_requests_get_their_places_in_little_time() -> None:
    async def main() -> None:
        turns = LoadTurns()
        tickets = [turns.make_ticket(f"{number % 100}") for number in range(20_000)]
        started = time.process_time()
        assert choose_tickets(tickets, Counter(), 20_000) == tickets
        assert len(choose_tickets(tickets, Counter(), 19_999)) == 19_999
        # each choice among all that wait would take minutes
        assert time.process_time() - started < 5

    asyncio.run(main())


def ask(world: World, model: str, client: str) -> asyncio.Task[str]:
    async def answer() -> str:
        scope = {
            "type": "http",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
            "client": (client, 1),
        }
        body = b'{"model": "%s"}' % model.encode()
        messages: list[Any] = [message async for message in world.pool.ask(scope, body, b"")]
        return b"".join(message.get("body", b"") for message in messages).decode()

    return asyncio.ensure_future(answer())


def test_a_flood_for_one_model_does_not_keep_another_out(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        flood = [ask(world, "a", "x")]
        await world.until(lambda: world.n_open == 1)
        other = ask(world, "b", "y")
        a, b = world.pool.models["a"], world.pool.models["b"]
        await world.until(lambda: a.drains_for == "room for b")
        flood += [ask(world, "a", "x") for _ in range(30)]
        await world.until(lambda: a.n_waiting == 30)
        world.may_answer.set()
        assert await other == "b"
        assert world.loads == ["a", "b"]  # b waited for one answer of a
        assert sum(answer.done() for answer in flood) == 1

        # while b waits again, a turn of a has only so many requests of the flood
        world.may_answer.clear()
        await world.until(lambda: a.state == "loading" or a.n_running > 0)
        other = ask(world, "b", "y")
        await world.until(lambda: bool(a.n_running) and bool(b.n_waiting))
        world.may_answer.set()
        assert await other == "b"
        await asyncio.gather(*flood)

    run(scenario, tmp_path, {"a": ALONE, "b": ALONE})


def test_a_turn_has_a_limited_number_of_requests_while_others_wait(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        first = ask(world, "c", "y")
        c = world.pool.models["c"]
        await world.until(lambda: c.n_running == 1)
        flood = [ask(world, "a", "x") for _ in range(30)]
        others = [ask(world, "b", "y")]
        await world.until(lambda: c.drains_for == "room for a")
        await world.until(lambda: world.pool.models["b"].n_waiting == 1)
        blocked, world.may_answer = world.may_answer, asyncio.Event()
        blocked.set()  # c answers; the answers of a wait
        assert await first == "c"
        a = world.pool.models["a"]
        await world.until(lambda: a.state == "loaded")
        assert a.n_running == ROUNDS_OF_A_TURN  # for its one parallel answer
        assert a.n_waiting == 30 - ROUNDS_OF_A_TURN
        await world.until(lambda: a.drains_for == "room for b")  # b is planned
        world.may_answer.set()
        assert await asyncio.gather(*others) == ["b"]
        assert sum(answer.done() for answer in flood) == ROUNDS_OF_A_TURN
        assert set(await asyncio.gather(*flood)) == {"a"}
        assert world.loads == ["c", "a", "b", "a"]

    run(scenario, tmp_path, {"a": ALONE, "b": ALONE, "c": ALONE})


def test_loaded_models_at_their_limit_pass_no_turns_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    turn = LoadTurns.turn

    def counted_turn(self: LoadTurns, model: Any) -> Any:
        turns.append(model.name)
        return turn(self, model)

    monkeypatch.setattr(LoadTurns, "turn", counted_turn)
    may_plan, plan = threading.Event(), FakeProcess.plan

    def blocked_plan(self: FakeProcess, limits: Any) -> Any:
        assert self.name != "c" or may_plan.wait(20)
        return plan(self, limits)

    monkeypatch.setattr(FakeProcess, "plan", blocked_plan)

    async def scenario(world: World) -> None:
        await asyncio.gather(world.ask("a"), world.ask("b"))
        world.may_answer.clear()
        other = ask(world, "c", "z")
        a, b, c = (world.pool.models[name] for name in "abc")
        await world.until(lambda: c.state == "loading")
        turns.clear()
        floods = [ask(world, name, name) for name in "ab" for _ in range(30)]
        await world.until(lambda: a.n_running == b.n_running == ROUNDS_OF_A_TURN)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (a.n_waiting, b.n_waiting) == (30 - ROUNDS_OF_A_TURN,) * 2
        may_plan.set()
        # no client waits any more for a model that is not loaded
        await world.until(lambda: not a.n_waiting and not b.n_waiting)
        assert c.n_running == 1
        assert turns == []
        world.may_answer.set()
        await asyncio.gather(other, *floods)

    try:
        run(scenario, tmp_path, dict.fromkeys("abc", 200 * MIB))
    finally:
        may_plan.set()


def test_requests_of_a_loaded_model_count_for_no_turn() -> None:
    async def main() -> None:
        line = Line()
        loaded = Model("loaded", [line.turns.make_ticket("y")], is_ready=True)
        holder = Model("now", [line.turns.make_ticket("x")])
        async with line.turns.turn(loaded):
            assert not line.turns.is_contended(holder)
        async with line.turns.turn(holder):
            await line.add("x", "x")
            await line.add("y", "y")
        assert await line.finish() == ["y", "x"]

    asyncio.run(main())


def test_models_of_a_flooding_client_take_turns_with_that_of_another(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.may_answer.clear()
        answers = [ask(world, "a", "x")]
        await world.until(lambda: world.n_open == 1)
        for name in "bcd":
            answers.append(ask(world, name, "x"))
            await world.until(lambda name=name: world.pool.models[name].n_waiting == 1)
        answers.append(ask(world, "e", "y"))
        await world.until(lambda: world.pool.models["e"].state == "queued")
        for _ in range(5):
            await asyncio.sleep(0)
        world.may_answer.set()
        await asyncio.gather(*answers)
        # b had the turn already when y came
        assert world.loads == ["a", "b", "e", "c", "d"]

    run(scenario, tmp_path, dict.fromkeys("abcde", ALONE))
