"""A sequence that is set back to a checkpoint, or copied from it, continues bit for bit as before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding.contexts.context import Aborted, Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows, StopFlag
from llmcli.runtime.kv_cache.ledger import Ledger
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.quant import families, tiny_gguf

HYBRIDS = ("Qwen3_5ForCausalLM", "NemotronHForCausalLM", "Lfm2ForCausalLM", "GptOssForCausalLM")
TEXT = [(7 + 11 * number) % 250 for number in range(120)]
END = [(3 + 5 * number) % 250 for number in range(12)]


@pytest.fixture(scope="module", params=["mamba", "gemma3", *HYBRIDS])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose state cannot be cut at every token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param == "mamba":
        return tiny_gguf.mamba(folder / "m.gguf")
    if request.param == "gemma3":
        return tiny_gguf.gemma3(folder / "m.gguf", hidden=128, layers=6)
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    return convert(request.param, folder)


def convert(hf: str, folder: Path) -> Path:
    """Return the file of a tiny random model of a class of transformers."""
    case = next(case for case in families.cases() if case.hf == hf)
    families.build(case, folder / "tiny")
    out = folder / "m.gguf"
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "F16"), out, threads=1)
    return out


@pytest.fixture
def context(model_file: Path) -> Iterator[Context]:
    options = ContextOptions(1024, 128, 128, 3)
    with open_model(model_file) as model, open_context(model, options) as opened:
        yield opened


def compute(context: Context, sequence: int, start: int, tokens: list[int]) -> bytes:
    """Compute tokens in one pass, and return the logits of the last one."""
    rows = BatchRows(
        tokens,
        range(start, start + len(tokens)),
        [sequence] * len(tokens),
        [False] * (len(tokens) - 1) + [True],
    )
    (row,) = context.decode(rows)
    return row.logits.tobytes()


def continue_text(context: Context, sequence: int) -> bytes:
    """Compute END after TEXT, token by token, and return the logits of all tokens."""
    return b"".join(
        compute(context, sequence, len(TEXT) + number, [token]) for number, token in enumerate(END)
    )


def test_a_sequence_goes_back_to_a_checkpoint(context: Context) -> None:
    assert context.needs_checkpoints
    compute(context, 0, 0, TEXT)
    checkpoint = context.read_checkpoint(0)
    expected = continue_text(context, 0)
    for later in range(3):
        compute(context, 0, len(TEXT) + len(END), TEXT[: 20 * later + 1])
        assert context.restore_checkpoint(0, checkpoint, len(TEXT))
        assert context.last_position(0) == len(TEXT) - 1
        assert continue_text(context, 0) == expected


def test_a_copy_from_a_checkpoint_leaves_its_source_alone(context: Context) -> None:
    compute(context, 0, 0, TEXT)
    checkpoint = context.read_checkpoint(0)
    expected = continue_text(context, 0)
    after = len(TEXT) + len(END)
    assert context.restore_checkpoint(2, checkpoint, len(TEXT), source=0)
    assert continue_text(context, 2) == expected
    undisturbed = compute(context, 0, after, [9])
    assert context.restore_checkpoint(0, checkpoint, len(TEXT))
    assert continue_text(context, 0) == expected
    assert compute(context, 0, after, [9]) == undisturbed


def test_copies_of_the_end_continue_apart(context: Context) -> None:
    compute(context, 0, 0, TEXT)
    checkpoint = context.read_checkpoint(0)
    if context.is_recurrent:
        context.copy(0, 1, 0, len(TEXT))
    else:
        assert context.restore_checkpoint(1, checkpoint, len(TEXT), source=0)
    expected = continue_text(context, 0)
    assert continue_text(context, 1) == expected


def test_a_damaged_checkpoint_is_refused_and_the_sequence_is_empty(context: Context) -> None:
    compute(context, 0, 0, TEXT)
    checkpoint = context.read_checkpoint(0)
    assert not context.restore_checkpoint(0, memoryview(bytes(checkpoint)[:-8]), len(TEXT))
    assert context.last_position(0) == -1
    compute(context, 0, 0, TEXT)


@pytest.mark.parametrize("hf", HYBRIDS[:3])
def test_recurrent_state_goes_back_within_the_last_pass(hf: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    path = convert(hf, tmp_path)
    options = ContextOptions(512, 128, 128, 2, n_rs_seq=3)
    with open_model(path) as model, open_context(model, options) as context:
        assert context.n_rs_seq == 3
        for dropped in range(4):
            context.trim(0, 0)
            context.trim(1, 0)
            compute(context, 0, 0, TEXT)
            compute(context, 0, len(TEXT), END[:4])
            length = len(TEXT) + 4 - dropped
            assert context.trim(0, length)
            assert context.last_position(0) == length - 1
            compute(context, 1, 0, TEXT)
            for number, token in enumerate(END[: 4 - dropped]):
                compute(context, 1, len(TEXT) + number, [token])
            for number, token in enumerate(END[4:]):
                ours, expected = (
                    np.frombuffer(compute(context, sequence, length + number, [token]), np.float32)
                    for sequence in (0, 1)
                )
                assert families.nmse(ours, expected) < 1e-4
        # once, by three tokens at most, and not into an earlier pass
        assert not context.trim(0, context.last_position(0))
        at = context.last_position(0) + 1
        compute(context, 0, at, END[:6])
        assert not context.trim(0, at + 2)
        assert not context.trim(0, at + 4)


class NodeInterrupt:
    """Interrupts the passes of a context before the node of the graph at which `n_left` is 0. A
    negative number interrupts none.
    """

    def __init__(self) -> None:
        self.n_left, self.stop = -1, StopFlag()
        self.callback = lib().ggml_backend_sched_eval_callback(self._before_node)

    def _before_node(self, _pointer: int, is_question: bool, _data: object) -> bool:
        if is_question and self.n_left >= 0:
            if not self.n_left:
                self.stop.request_stop()
            self.n_left -= 1
        return True


@contextmanager
def open_interrupted(path: Path) -> Iterator[tuple[Context, NodeInterrupt]]:
    """Open a context whose recurrent state can go back by three tokens."""
    interrupt = NodeInterrupt()
    options = ContextOptions(512, 128, 32, 2, n_rs_seq=3)
    with (
        open_model(path) as model,
        open_context(model, options, interrupt.callback, interrupt.stop) as context,
    ):
        yield context, interrupt


@pytest.mark.parametrize("hf", HYBRIDS[:3])
def test_an_interrupted_pass_is_no_pass_to_go_back_in(hf: str, tmp_path: Path) -> None:
    """llama.cpp drops the rows of such a pass as if all of its layers had been computed."""
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    with open_interrupted(convert(hf, tmp_path)) as (context, interrupt):
        compute(context, 1, 0, TEXT)
        expected = continue_text(context, 1)
        for n_rows, n_nodes in ((1, 0), (1, 40), (2, 40), (3, 0), (3, 60)):
            ledger = Ledger(context)
            assert context.trim(0, 0)
            compute(context, 0, 0, TEXT)
            ledger.append(0, TEXT)
            assert ledger.take_checkpoint(0)
            for number, token in enumerate(END[:2]):
                compute(context, 0, len(TEXT) + number, [token])
            ledger.append(0, END[:2])
            interrupt.n_left = n_nodes
            with pytest.raises(Aborted):
                compute(context, 0, len(TEXT) + 2, END[2 : 2 + n_rows])
            ledger.restore(0)
            assert ledger.tokens[0] == TEXT
            assert context.last_position(0) == len(TEXT) - 1
            assert continue_text(context, 0) == expected
        interrupt.n_left = 0
        with pytest.raises(Aborted):
            compute(context, 0, len(TEXT) + len(END), [5])
        assert context.trim(0, 0)
        compute(context, 0, 0, TEXT)
        assert continue_text(context, 0) == expected


@pytest.mark.parametrize("hf", HYBRIDS[:3])
def test_a_micro_batch_before_the_interrupted_one_is_no_pass_to_go_back_in(
    hf: str, tmp_path: Path
) -> None:
    """The one row of a sequence is in the first micro-batch, and the second one is interrupted. How
    far the sequence could go back in its pass before does not count any more.
    """
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    with open_interrupted(convert(hf, tmp_path)) as (context, interrupt):
        count = len(TEXT)
        rows = BatchRows(
            [END[0], *TEXT],
            [count, *range(count)],
            [0, *[1] * count],
            [True, *[False] * count],
        )
        compute(context, 0, 0, TEXT)
        interrupt.n_left = n_before = 1 << 20
        context.decode(rows)
        n_nodes = n_before - interrupt.n_left
        context.clear()
        compute(context, 0, 0, TEXT)
        interrupt.n_left = n_nodes // 2
        with pytest.raises(Aborted):
            context.decode(rows)
        assert context.last_position(0) == count
        assert not context.trim(0, count)
        assert context.trim(0, 0)
        assert context.trim(1, 0)
        compute(context, 0, 0, TEXT)


@pytest.mark.parametrize("hf", HYBRIDS[:3])
def test_micro_batches_of_a_few_rows_keep_no_states_to_go_back_to(hf: str, tmp_path: Path) -> None:
    """llama.cpp ends the process where a micro-batch has no more rows than states to keep."""
    pytest.importorskip("transformers", reason="transformers is not installed: it makes the models")
    path = convert(hf, tmp_path)
    with open_model(path) as model:
        for n_batch, n_ubatch, n_rs_seq in ((128, 1, 0), (128, 4, 0), (4, 64, 0), (128, 5, 3)):
            options = ContextOptions(512, n_batch, n_ubatch, 2, n_rs_seq=3)
            with open_context(model, options) as context:
                assert context.n_rs_seq == n_rs_seq
                for start in range(0, len(TEXT), n_batch):
                    compute(context, 0, start, TEXT[start : start + n_batch])
                assert len(continue_text(context, 0)) == 4 * model.n_vocab * len(END)
