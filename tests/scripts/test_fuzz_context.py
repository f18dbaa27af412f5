"""scripts/fuzz/context.py, in a process so that an abort of llama.cpp fails the test; and contexts
of models with a sliding window.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kv_state.positions import Positions, batch_spans
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from tests.quant import tiny_gguf

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("flags", [[], ["--streams"]], ids=["one pool", "a stream a sequence"])
def test_random_operations_agree_with_the_reference(stories_gguf, flags):
    command = [
        sys.executable,
        ROOT / "scripts" / "fuzz" / "context.py",
        stories_gguf,
        "--operations",
        "1000",
        *flags,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert figures["operations"] >= 1000
    assert figures["legal share"] >= 0.3
    assert figures["refused"] >= 100
    assert figures["shifts"] >= 10
    assert figures["rows compared"] >= 20
    assert flags or figures["trees"] >= 10


@pytest.mark.parametrize(
    ("positions", "sequences"),
    [
        ((0, 2), (0, 0)),
        ((0, 0), (0, 0)),
        ((1, 0), (0, 0)),
        ((0, 5, 2), (0, 1, 0)),
        ((1, 2), (0, 0)),
        ((0,), (1,)),
        ((-1,), (0,)),
    ],
)
def test_rows_that_do_not_continue_their_sequence_are_refused(positions, sequences):
    lengths = Positions(2)
    lengths.set_length(1, 5)
    with pytest.raises(AssertionError):
        lengths.check(batch_spans(positions, sequences))


def test_trim_is_refused_behind_the_first_position_of_a_sliding_window(tmp_path):
    """After such a trim, llama.cpp has the cells of the dense layers, but not those of the layers
    with a window.
    """
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128, layers=6)
    options = ContextOptions(1024, 128, 16, 1, 1, 1, "f32", "f32", "off")
    with open_model(path) as model, open_context(model, options) as context:
        assert model.n_swa == 16
        for start in range(0, 768, 128):
            context.decode(
                BatchRows([5] * 128, range(start, start + 128), [0] * 128, [False] * 128)
            )
        first = context.first_position(0)
        assert first > 0
        assert not context.trim(0, first + 1)
        assert (context.first_position(0), context.last_position(0)) == (first, 767)
        assert context.trim(0, 760)
        assert len(context.decode(BatchRows([5], [760], [0], [True]))) == 1
        assert context.trim(0, 0)
        assert (context.first_position(0), context.last_position(0)) == (-1, -1)
        assert len(context.decode(BatchRows([5], [0], [0], [True]))) == 1


@pytest.mark.parametrize(("slots", "rows"), [(1, 128), (3, 16)])
def test_batch_of_several_sequences_with_a_window_is_one_micro_batch(tmp_path, slots, rows):
    path = tiny_gguf.gemma3(tmp_path / "m.gguf", hidden=128)
    with (
        open_model(path) as model,
        open_context(model, ContextOptions(512, 128, 16, slots)) as context,
    ):
        assert context.n_batch == rows
        with pytest.raises(AssertionError):
            context.decode(
                BatchRows([5] * (rows + 1), range(rows + 1), [0] * (rows + 1), [False] * (rows + 1))
            )
        context.decode(BatchRows([5] * rows, range(rows), [0] * rows, [False] * rows))


def test_copy_needs_a_target_that_ends_where_the_copied_range_begins(stories_gguf):
    with (
        open_model(stories_gguf) as model,
        open_context(model, ContextOptions(256, 32, 32, 3)) as context,
    ):
        context.decode(BatchRows([5, 6, 7, 8], range(4), [0] * 4, [False] * 4))
        context.copy(0, 1, 0, 3)
        for arguments in (
            (0, 1, 0, 4),
            (0, 1, 2, 4),
            (0, 2, 0, 5),
            (0, 0, 0, 1),
            (0, 2, 0, 0),
            (0, 3, 0, 1),
            (2, 1, 0, 1),
        ):
            with pytest.raises(AssertionError):
                context.copy(*arguments)
        context.copy(0, 1, 3, 4)
        assert [context.last_position(sequence) for sequence in range(3)] == [3, 3, -1]
