"""What the catalog's tests share: a hub on loopback, a watcher that remembers, a tiny GGUF."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmcli import config
from llmcli.config import Config
from tests.hub import Hub
from tests.quant import tiny


class Notes:
    """A watcher that remembers what it was told, and how far each bar came."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bars: list[tuple[str, int | None, int, list[int]]] = []
        self.on_advance: Callable[[int], None] = lambda _: None

    @contextmanager
    def bar(
        self, label: str, total: int | None, unit: str = "bytes", done: int = 0
    ) -> "Iterator[Notes]":
        self.bars.append((label, total, done, []))
        yield self

    def advance(self, amount: int) -> None:
        self.bars[-1][3].append(amount)
        self.on_advance(amount)

    def describe(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of ours, and no waiting between the library's retries."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def settings(home: Path) -> Callable[[], Config]:
    """The configuration as the environment is when it is called."""
    return config.load


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small GGUF that reads well."""
    return tiny.llama(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", hidden=64, ff=64, layers=1
    ).read_bytes()
