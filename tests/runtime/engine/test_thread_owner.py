"""Only the engine's thread calls the context; other threads only set flags."""

import threading

from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, fake_runner

CONTEXT_METHODS = ("decode", "trim", "copy", "first_position", "last_position")


def test_only_the_engine_s_thread_calls_the_context_while_another_thread_stops_the_answer() -> None:
    context = FakeContext(reply=b"hello" * 40, n_seq_max=3)
    runner = fake_runner(context=context)
    callers: dict[str, set[int]] = {name: set() for name in CONTEXT_METHODS}

    def record_callers(name: str) -> None:
        function = getattr(context, name)

        def recorded(*args: object) -> object:
            callers[name].add(threading.get_ident())
            return function(*args)

        setattr(context, name, recorded)

    for name in CONTEXT_METHODS:
        record_callers(name)
    reply = runner.reply(Request(tuple(b"say"), default_sampling(), 60), 3)

    def stop(number: int) -> None:
        if number == 4:
            thread = threading.Thread(target=reply.stop)
            thread.start()
            thread.join()

    context.before = stop
    for _ in reply:
        pass
    assert {answer.finish for answer in reply.answers} == {"cancelled"}
    runner.engine.ledger.check()
    assert callers["decode"] and callers["copy"]
    assert set().union(*callers.values()) == {threading.get_ident()}
