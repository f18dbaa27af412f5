"""Reading, encoding and writing at the same time: in order, bounded, and resumable."""

import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quant.calibration.statistics import InputStatistics
from quant.errors import DamagedSourceError, UserError
from quant.gguf import resumable_writer
from quant.quantize import pipeline, write
from quant.quantize.plan import Plan, TensorPlan, plan_quantization
from quant.source.source import Source, Weight
from tests.quant import tiny_gguf

ROWS, COLUMNS = 64, 256

CHILD = """
import sys
from pathlib import Path
from quant.quantize import pipeline
from quant.quantize.plan import plan_quantization
from quant.quantize.write import open_gguf, write_model

pipeline.SLAB_VALUES, pipeline.PIECE_VALUES = 16384, 2048
plan = plan_quantization(open_gguf(Path(sys.argv[1])), "Q4_K_M")

def watch(progress):
    print(progress.index, flush=True)
    sys.stdin.readline()  # goes on when it is told to

report = write_model(plan, Path(sys.argv[2]), threads=2, on_tensor=watch)
print(report.sha256)
"""


HANGING = """
import sys, threading
from dataclasses import replace
from pathlib import Path
from quant.quantize.plan import plan_quantization
from quant.quantize.write import open_gguf, write_model

source = open_gguf(Path(sys.argv[1]))
source.__dict__["fingerprint"] = source.fingerprint
weights = list(source.weights)
weights[3] = replace(weights[3], read=lambda first, last: threading.Event().wait())
source.__dict__["weights"] = tuple(weights)

def watch(progress):
    if progress.index == 3:
        print(3, flush=True)

try:
    plan = plan_quantization(source, "Q4_K_M")
    write_model(plan, Path(sys.argv[2]), threads=2, on_tensor=watch)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("pipeline") / "tiny.gguf", layers=1)


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here; flushing to a busy disk is what would take the time."""
    monkeypatch.setattr(resumable_writer.os, "fsync", lambda handle: None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many slabs and pieces of a small model."""
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 16384)
    monkeypatch.setattr(pipeline, "PIECE_VALUES", 2048)


def plan(model: Path, change: Callable[[Weight], Weight] = lambda weight: weight) -> Plan:
    """A plan whose weights are read in another way."""
    source: Source = write.open_gguf(model)
    assert source.fingerprint  # read once, before the weights become strange
    changed = replace(source, weights=tuple(change(weight) for weight in source.weights))
    changed.__dict__["fingerprint"] = source.fingerprint
    return plan_quantization(changed, "Q4_K_M")


def whole(model: Path, out: Path) -> bytes:
    write.write_model(plan_quantization(write.open_gguf(model), "Q4_K_M"), out, threads=1)
    return out.read_bytes()


def tasks(
    count: int, read: Callable[[int, int], np.ndarray] | None = None
) -> tuple[TensorPlan, ...]:
    rng = np.random.default_rng(0)
    data = rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32).view(np.uint8)
    weight = Weight(
        "w", (COLUMNS, ROWS), "F32", read or (lambda first, last: data[first:last].copy())
    )
    return (
        TensorPlan(weight, "Q8_0", None, ROWS * 272, InputStatistics("w", COLUMNS, ROWS)),
    ) * count


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(1 << 24, 1 << 18), (16384, 2048), (2560, 1)])
def test_threads_slabs_and_pieces_do_not_change_the_bytes(
    threads: int,
    sizes: tuple[int, int],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = whole(model, tmp_path / "whole.gguf")
    monkeypatch.setattr(pipeline, "SLAB_VALUES", sizes[0])
    monkeypatch.setattr(pipeline, "PIECE_VALUES", sizes[1])
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_BYTES", sizes[0] * 20)
    write.write_model(plan(model), tmp_path / "out.gguf", threads=threads)
    assert (tmp_path / "out.gguf").read_bytes() == expected


def test_what_is_alive_is_bounded_and_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = 16 * COLUMNS
    monkeypatch.setattr(pipeline, "SLAB_VALUES", slab)
    monkeypatch.setattr(pipeline, "PIECE_VALUES", slab // 4)
    limit = 3 * (slab * 4 + 16 * 272)
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_BYTES", limit)
    alive, most, ahead = [], [], threading.Event()

    def read(first: int, last: int) -> np.ndarray:
        data = np.zeros((last - first, COLUMNS * 4), np.uint8)
        alive.append(data.nbytes)
        weakref.finalize(data, alive.remove, data.nbytes)
        most.append(sum(alive))
        if len(most) == 3:
            ahead.set()
        return data

    pieces = pipeline.encode_rows(tasks(8, read), threads=2)
    next(pieces)
    assert ahead.wait(120), "two more slabs are read while the first is being written"
    assert len(list(pieces)) == 8 * ROWS // 4 - 1
    assert len(most) == 8 * ROWS // 16
    assert max(most) <= limit


def test_a_slab_larger_than_all_room_goes_through_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_BYTES", 100)
    assert (
        sum(piece.last - piece.first for piece in pipeline.encode_rows(tasks(3), threads=2))
        == 3 * ROWS
    )


@pytest.mark.usefixtures("small")
def test_rows_are_read_once_in_order_by_one_thread_that_is_not_the_writers(
    model: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    readers = set()

    def noted(weight: Weight) -> Weight:
        def read(first: int, last: int) -> np.ndarray:
            seen.append((weight.name, first, last))
            readers.add(threading.current_thread())
            return weight.read(first, last)

        return replace(weight, read=read)

    made = plan(model, noted)
    write.write_model(made, tmp_path / "out.gguf", threads=3)
    assert len(readers) == 1
    assert threading.current_thread() not in readers
    for step in made.steps:
        spans = [(first, last) for name, first, last in seen if name == step.weight.name]
        assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
        assert spans[-1][1] == step.weight.rows
    assert list(dict.fromkeys(name for name, _, _ in seen)) == [
        step.weight.name for step in made.steps
    ]


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    pieces = pipeline.encode_rows(tasks(100), threads=3)
    next(pieces)
    pieces.close()
    assert threading.active_count() == before


def poisoned(*names: str) -> Callable[[Weight], Weight]:
    """Weights of these names end with a NaN."""

    def change(weight: Weight) -> Weight:
        def read(first: int, last: int) -> np.ndarray:
            data = weight.read(first, last)
            if last == weight.rows:
                data[-1, -4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
            return data

        return replace(weight, read=read) if weight.name in names else weight

    return change


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["output.weight", "output_norm.weight"])
def test_a_nan_in_the_last_tensor_is_named_and_nothing_is_finished(
    name: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(DamagedSourceError, match=f"{name} contains NaN"):
        write.write_model(plan(model, poisoned(name)), tmp_path / "out.gguf", threads=2)
    assert not [path.name for path in tmp_path.iterdir() if path.name != "home"]


def test_of_two_mistakes_the_first_in_the_files_order_is_told(model: Path, tmp_path: Path) -> None:
    bad = plan(
        model, poisoned("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_norm.weight")
    )
    for _ in range(5):
        with pytest.raises(DamagedSourceError, match=r"blk\.0\.ffn_norm\.weight contains NaN"):
            write.write_model(bad, tmp_path / "out.gguf", threads=4)


@pytest.mark.usefixtures("small")
def test_a_source_that_stops_answering_is_gone_on_with(model: Path, tmp_path: Path) -> None:
    expected, out = whole(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"

    def cut(weight: Weight) -> Weight:
        def read(first: int, last: int) -> np.ndarray:
            if first > weight.rows // 2:
                raise UserError("the line went dead")
            return weight.read(first, last)

        return replace(weight, read=read) if weight.name == "blk.0.ffn_up.weight" else weight

    with pytest.raises(UserError, match="the line went dead"):
        write.write_model(plan(model, cut), out, threads=2)
    assert not out.exists()
    report = write.write_model(plan(model), out, threads=2)
    slot = next(slot for slot in report.plan.layout.slots if slot.name == "blk.0.ffn_up.weight")
    assert slot.offset < report.resumed_bytes < slot.offset + slot.nbytes
    assert out.read_bytes() == expected


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("written", [False, True])
def test_a_failure_at_every_step_of_the_journal_is_resumed_to_the_same_file(
    written: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, out = whole(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"
    made, line, count, failed = plan(model), resumable_writer.ResumableWriter._write_line, 0, 0
    while True:
        steps = iter(range(count))

        def fail(
            self: resumable_writer.ResumableWriter, entry: dict[str, str | int], steps=steps
        ) -> None:
            if written or next(steps, None) is not None:
                line(self, entry)
                if written and next(steps, None) is None:
                    raise KeyboardInterrupt
            else:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(resumable_writer.ResumableWriter, "_write_line", fail)
            try:
                write.write_model(made, out, threads=1)
                break
            except KeyboardInterrupt:
                failed += 1
        assert write.write_model(made, out, threads=1).resumed_bytes > 0 or count <= 1
        assert out.read_bytes() == expected
        out.unlink()
        count += 1
    assert failed > 30


def test_a_run_killed_again_and_again_ends_with_the_same_sha256(
    model: Path, tmp_path: Path
) -> None:
    unbroken = write.write_model(plan(model), tmp_path / "whole.gguf", threads=1).sha256
    out, killed, chance = tmp_path / "out.gguf", 0, random.Random(7)
    command = [sys.executable, "-c", CHILD, str(model), str(out)]
    while True:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin as stdin, child.stdout as stdout:
            for said in stdout:
                last = said.strip()
                if killed < 4 and chance.random() < 0.1:
                    child.kill()
                    break
                if last.isdigit():
                    stdin.write("\n")
                    stdin.flush()
        if child.wait() == 0:
            break
        assert child.returncode == -signal.SIGKILL
        killed += 1
    assert last == unbroken
    assert killed > 0


def test_a_real_ctrl_c_leaves_at_once_and_the_next_run_goes_on(model: Path, tmp_path: Path) -> None:
    """Of a source that does not answer: the reader hangs, the rest is at work."""
    expected, out = whole(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"
    child = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(model), str(out)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"3\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(120) == 130
    assert not out.exists()
    assert write.write_model(plan(model), out, threads=2).resumed == 3
    assert out.read_bytes() == expected


def test_ctrl_c_leaves_a_part_to_go_on_with(model: Path, tmp_path: Path) -> None:
    expected, out = whole(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"

    def interrupt(progress: write.WriteProgress) -> None:
        if progress.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan(model), out, threads=2, on_tensor=interrupt)
    assert write.write_model(plan(model), out, threads=2).resumed == 5
    assert out.read_bytes() == expected
