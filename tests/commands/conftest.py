"""The command line in this process: exit code, stdout, stderr; and a model that is not there."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmcli.catalog.fetch import Model
from llmcli.runtime.runner import Runner
from tests.fakes import TEMPLATE, Speak, fake_header, fake_runner


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def llmcli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run one command line, with `stdin` as what comes through the pipe."""

    def call(*words: str, stdin: bytes = b"") -> Done:
        from llmcli.app import main

        monkeypatch.setattr(sys, "argv", ["llmcli", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        code = left.value.code
        return Done(code if isinstance(code, int) else 0, out, err)

    return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Runner]]:
    """Let every REF be a fake model that says `reply`; the runners that were opened are in the
    list.
    """

    def install(
        reply: bytes | Speak = b"hello",
        *,
        template: str | None = TEMPLATE,
        n_ctx: int = 256,
        system: str | None = None,
        settings: dict[str, float] | None = None,
    ) -> list[Runner]:
        path = tmp_path / "fake.gguf"
        path.write_bytes(b"fake")
        opened: list[Runner] = []

        @contextmanager
        def open_runner(path: Path, options: object, **more: object) -> Iterator[Runner]:
            own = None if more.get("raw") else more.get("template") or template
            slots = int(more.get("slots", 1))  # type: ignore[call-overload]
            opened.append(fake_runner(reply, template=own, path=path, n_ctx=n_ctx, n_seq_max=slots))  # type: ignore[arg-type]
            yield opened[-1]

        model = Model(
            "fake", path, "gguf", 4, "", "local:fake", system=system, settings=settings or {}
        )
        monkeypatch.setattr("llmcli.runtime.runner.open_runner", open_runner)
        monkeypatch.setattr("llmcli.commands.ready.fetched", lambda ref, quant, config, ui: model)
        monkeypatch.setattr("quant.container.read", fake_header)
        return opened

    return install
