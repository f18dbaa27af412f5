"""/bench: its table, and that it does not change the conversation's cells."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession, MeasuredSpeed
from llmcli.chat.commands import run_command
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.local_model import LocalModel
from llmcli.commands.chat.bench_adapter import measure
from llmcli.errors import UserError
from llmcli.runtime.interrupt import defer_interrupts
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.ui import UI

MakeChat = Callable[..., ChatSession]


def test_bench_prints_a_table_and_checks_its_arguments(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = []

    def measure_fake(runner: Runner, prompt: int, answer: int) -> list[MeasuredSpeed]:
        requested.append((prompt, answer))
        return [
            MeasuredSpeed("pp16", 200.5, 1.25, None, None),
            MeasuredSpeed("tg8", 20.0, 0.5, 49.5, 52.25),
        ]

    chat = make_chat()
    with pytest.raises(UserError, match="nothing can be measured"):
        run_command(chat, "/bench")
    chat.measure_speed = measure_fake
    run_command(chat, "/bench")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "test tok/s p50 ms p99 ms",
        "pp16 200.50 ± 1.25",
        "tg8 20.00 ± 0.50 49.50 52.25",
    ]
    run_command(chat, "/bench 64")
    run_command(chat, "/bench 64 8")
    assert requested == [(128, 32), (64, 32), (64, 8)]
    for lengths in ("0", "many", "1 2 3", "257", "1 -1", "9" * 30):
        with pytest.raises(UserError, match="not valid lengths") as error:
            run_command(chat, f"/bench {lengths}")
        assert "up to 256" in error.value.hint


def test_bench_does_not_change_the_cells_of_the_conversation(
    stories_gguf: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(ctx_size=256, threads=1, cache_type_k="f32", cache_type_v="f32")
    with open_runner(stories_gguf, options) as runner:
        conversation = Conversation(default_sampling().with_values({"temp": 0}), predict=8)
        chat = ChatSession(
            "stories",
            LocalModel(runner),
            conversation,
            config.load_config(),
            UI(color=False),
            measure_speed=measure,
        )
        first = chat.ask("Once upon", StreamWriter(silent=True))
        cells = [*runner.engine.ledger.tokens[0]]
        run_command(chat, "/bench 16 4")
        rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert rows == ["test", "pp16", "tg4", "last"]
        with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            run_command(chat, "/bench 16 4")
        runner.engine.ledger.check()
        assert runner.engine.ledger.tokens[0] == cells
        assert chat.ask(" there", StreamWriter(silent=True)).cached_tokens >= first.prompt_tokens
