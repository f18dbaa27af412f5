"""The context has one owner thread: other threads only set flags."""

import threading

from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, fake_runner

OWNED = ("decode", "trim", "copy", "first_position", "last_position")


def test_only_the_owner_calls_the_context_while_another_thread_stops_the_answer() -> None:
    context = FakeContext(reply=b"hello" * 40, n_seq_max=3)
    runner = fake_runner(context=context)
    callers: dict[str, set[int]] = {name: set() for name in OWNED}

    def watched(name: str) -> None:
        function = getattr(context, name)

        def told(*args: object) -> object:
            callers[name].add(threading.get_ident())
            return function(*args)

        setattr(context, name, told)

    for name in OWNED:
        watched(name)
    reply = runner.reply(Request(tuple(b"say"), default_sampling(), 60), 3)

    def stop(number: int) -> None:
        if number == 4:
            other = threading.Thread(target=reply.stop)
            other.start()
            other.join()

    context.before = stop
    for _ in reply:
        pass
    assert {answer.finish for answer in reply.answers} == {"cancelled"}
    runner.engine.ledger.check()
    assert callers["decode"] and callers["copy"]
    assert set().union(*callers.values()) == {threading.get_ident()}
