"""/bench: its table, and that it keeps the cells of the conversation."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession, MeasuredSpeed
from llmcli.chat.commands import run_command
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.commands.chat.bench_adapter import measure
from llmcli.errors import UserError
from llmcli.runtime.interrupt import defer_interrupts
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI

Make = Callable[..., ChatSession]


def test_speeds_are_a_table_and_lengths_are_checked(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def told(runner: Runner, prompt: int, answer: int) -> list[MeasuredSpeed]:
        asked.append((prompt, answer))
        return [
            MeasuredSpeed("pp16", 200.5, 1.25, None, None),
            MeasuredSpeed("tg8", 20.0, 0.5, 49.5, 52.25),
        ]

    one = talk()
    with pytest.raises(UserError, match="nothing can be measured"):
        run_command(one, "/bench")
    one.measure_speed = told
    run_command(one, "/bench")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "test tok/s p50 ms p99 ms",
        "pp16 200.50 ± 1.25",
        "tg8 20.00 ± 0.50 49.50 52.25",
    ]
    run_command(one, "/bench 64")
    run_command(one, "/bench 64 8")
    assert asked == [(128, 32), (64, 32), (64, 8)]
    for rest in ("0", "many", "1 2 3", "257", "1 -1", "9" * 30):
        with pytest.raises(UserError, match="not valid lengths") as error:
            run_command(one, f"/bench {rest}")
        assert "up to 256" in error.value.hint


def test_a_measurement_and_one_that_is_stopped_leave_the_conversation_its_cells(
    stories_gguf: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(ctx_size=256, threads=1, cache_type_k="f32", cache_type_v="f32")
    with open_runner(stories_gguf, options) as runner:
        session = Conversation(default_sampling().with_values({"temp": 0}), predict=8)
        one = ChatSession(
            "stories", runner, session, config.load_config(), UI(color=False), measure_speed=measure
        )
        first = one.ask("Once upon", StreamWriter(silent=True))
        before = [*runner.engine.ledger.tokens[0]]
        run_command(one, "/bench 16 4")
        rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert rows == ["test", "pp16", "tg4", "last"]
        with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            run_command(one, "/bench 16 4")
        runner.engine.ledger.check()
        assert runner.engine.ledger.tokens[0] == before
        assert one.ask(" there", StreamWriter(silent=True)).cached_tokens >= first.prompt_tokens
