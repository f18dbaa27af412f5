"""Clients get turns in rotation, however many turns one of them waits for."""

import asyncio
from collections.abc import Awaitable, Callable

from llmcli.serve.engine_thread.fair_turns import FairTurns


def run(scenario: Callable[[FairTurns], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(FairTurns())

    asyncio.run(main())


def test_a_late_client_waits_for_one_turn_of_each_other_client() -> None:
    served: list[str] = []

    async def scenario(turns: FairTurns) -> None:
        async def one(client: str) -> None:
            async with turns.turn(client):
                served.append(client)
                await asyncio.sleep(0)

        await asyncio.gather(*map(one, ["much"] * 8 + ["little", "third", "little"]))

    run(scenario)
    assert served[:6] == ["much", "much", "little", "third", "much", "little"]
    assert sorted(served) == sorted(["much"] * 8 + ["little", "third", "little"])


def test_a_turn_is_never_lost_and_never_given_twice() -> None:
    async def scenario(turns: FairTurns) -> None:
        n_inside, most = 0, 0

        async def one(client: str, steps: int) -> None:
            nonlocal n_inside, most
            async with turns.turn(client):
                n_inside += 1
                most = max(most, n_inside)
                try:
                    for _ in range(steps):
                        await asyncio.sleep(0)
                finally:
                    n_inside -= 1

        for cancelled in range(12):
            n_inside = most = 0
            tasks = [asyncio.ensure_future(one("ab"[n % 2], n % 3)) for n in range(8)]
            for _ in range(cancelled):
                await asyncio.sleep(0)
            # one that waits, or that has just been given its turn
            tasks[cancelled % 8].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [
                result
                for result in results
                if result is not None and not isinstance(result, asyncio.CancelledError)
            ] == []
            assert (n_inside, most) == (0, 1)
            async with turns.turn("later"):
                pass

    run(scenario)
