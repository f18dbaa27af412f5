"""llama.cpp contexts: random operations in a child process, so that an abort fails the test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.binding.positions import Positions, batch_spans
from tests.quant import tiny_gguf

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("more", [[], ["--streams"]], ids=["one pool", "a stream a sequence"])
def test_random_operations_are_refused_or_do_what_the_reference_says(stories_gguf, more):
    command = [
        sys.executable,
        ROOT / "scripts" / "fuzz" / "context.py",
        stories_gguf,
        "--operations",
        "1000",
        *more,
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
def test_rows_that_do_not_follow_on_are_refused(positions, sequences):
    reached = Positions(2)
    reached.set_length(1, 5)
    with pytest.raises(AssertionError):
        reached.check(batch_spans(positions, sequences))


def test_a_window_that_has_moved_on_cannot_be_cut_back(tmp_path):
    """Cut where the window is gone, llama.cpp keeps the dense layers' cells and loses the others'."""
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
def test_several_sequences_of_a_window_are_computed_a_micro_batch_at_a_time(tmp_path, slots, rows):
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


def test_a_copy_goes_onto_a_sequence_that_ends_where_it_begins(stories_gguf):
    with (
        open_model(stories_gguf) as model,
        open_context(model, ContextOptions(256, 32, 32, 3)) as context,
    ):
        context.decode(BatchRows([5, 6, 7, 8], range(4), [0] * 4, [False] * 4))
        context.copy(0, 1, 0, 3)
        for wrong in (
            (0, 1, 0, 4),
            (0, 1, 2, 4),
            (0, 2, 0, 5),
            (0, 0, 0, 1),
            (0, 2, 0, 0),
            (0, 3, 0, 1),
            (2, 1, 0, 1),
        ):
            with pytest.raises(AssertionError):
                context.copy(*wrong)
        context.copy(0, 1, 3, 4)
        assert [context.last_position(sequence) for sequence in range(3)] == [3, 3, -1]
