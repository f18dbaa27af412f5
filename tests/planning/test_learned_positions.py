"""Models with learned positions, such as GPT-2, never get a longer text: llama.cpp would abort."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows
from quant.model_file.read_header import read_header
from scripts.fuzz import tiny_architectures
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "tiny.gguf"
    assert tiny_architectures.write_model(path, "gpt2") == ""
    return path


def test_the_header_knows_the_positions(gpt2: Path, stories_gguf: Path) -> None:
    assert read_header(gpt2).max_positions == 256
    assert read_header(stories_gguf).max_positions is None


@pytest.mark.parametrize("arch", ["gpt2", "mpt", "starcoder"])
def test_a_context_computes_no_later_position(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    assert tiny_architectures.write_model(path, arch) == ""
    with (
        open_model(path, ON_HOST) as model,
        open_context(model, ContextOptions(512)) as context,
    ):
        assert context.n_ctx == 256
        context.decode(BatchRows([1] * 256, range(256), [0] * 256, [False] * 256))
        with pytest.raises(UserError, match="has learned 256 positions"):
            context.decode(BatchRows([1], [256], [0], [True]))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("run", "MODEL", "w1", "-c", "512"), "-c 256"),
        (("plan", "MODEL", "-c", "512", "--measure"), "-c 256"),
        (("bench", "MODEL", "-p", "300", "-n", "0", "-r", "1"), "use a smaller -d, -p or -n"),
    ],
)
def test_a_longer_context_is_refused(
    words: tuple[str, ...], hint: str, gpt2: Path, llmcli: Llmcli
) -> None:
    done = llmcli(*(str(gpt2) if word == "MODEL" else word for word in words))
    assert done.code == 1
    assert "tiny.gguf has learned 256 positions" in done.err
    assert f"hint: {hint}" in done.err


def test_an_answer_ends_at_the_last_position(gpt2: Path, llmcli: Llmcli) -> None:
    done = llmcli("run", str(gpt2), "w1", "-t", "1", "--raw", "--ignore-eos", "--endless")
    assert done.code == 0, done.err
    assert "256/256 cells" in done.err
