"""Tensors are read, encoded and written concurrently: in order, with bounded memory, resumable."""

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

WAITING_PROGRAM = """
import sys
from pathlib import Path
from quant.quantize import pipeline
from quant.quantize.plan import plan_quantization
from quant.quantize.write import open_gguf, write_model

pipeline.SLAB_VALUES, pipeline.PIECE_VALUES = 16384, 2048
plan = plan_quantization(open_gguf(Path(sys.argv[1])), "Q4_K_M")

def watch(progress):
    print(progress.index, flush=True)
    sys.stdin.readline()  # waits for the test

report = write_model(plan, Path(sys.argv[2]), threads=2, on_tensor=watch)
print(report.sha256)
"""


HANGING_PROGRAM = """
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
    """Skip fsync: flushing to a busy disk is slow, and these tests simulate no power cut."""
    monkeypatch.setattr(resumable_writer.os, "fsync", lambda handle: None)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the small model into many slabs and pieces."""
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 16384)
    monkeypatch.setattr(pipeline, "PIECE_VALUES", 2048)


def plan(model: Path, change: Callable[[Weight], Weight] = lambda weight: weight) -> Plan:
    """Return a Q4_K_M plan of the model, with weights changed by `change`."""
    source: Source = write.open_gguf(model)
    assert source.fingerprint  # read before the weights are changed
    changed = replace(source, weights=tuple(change(weight) for weight in source.weights))
    changed.__dict__["fingerprint"] = source.fingerprint
    return plan_quantization(changed, "Q4_K_M")


def expected_bytes(model: Path, out: Path) -> bytes:
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
    expected = expected_bytes(model, tmp_path / "whole.gguf")
    monkeypatch.setattr(pipeline, "SLAB_VALUES", sizes[0])
    monkeypatch.setattr(pipeline, "PIECE_VALUES", sizes[1])
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_BYTES", sizes[0] * 20)
    write.write_model(plan(model), tmp_path / "out.gguf", threads=threads)
    assert (tmp_path / "out.gguf").read_bytes() == expected


def test_buffered_bytes_are_limited_while_reading_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = 16 * COLUMNS
    monkeypatch.setattr(pipeline, "SLAB_VALUES", slab)
    monkeypatch.setattr(pipeline, "PIECE_VALUES", slab // 4)
    limit = 3 * (slab * 4 + 16 * 272)
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_BYTES", limit)
    alive, buffered, three_slabs_read = [], [], threading.Event()

    def read(first: int, last: int) -> np.ndarray:
        data = np.zeros((last - first, COLUMNS * 4), np.uint8)
        alive.append(data.nbytes)
        weakref.finalize(data, alive.remove, data.nbytes)
        buffered.append(sum(alive))
        if len(buffered) == 3:
            three_slabs_read.set()
        return data

    pieces = pipeline.encode_rows(tasks(8, read), threads=2)
    next(pieces)
    assert three_slabs_read.wait(120), "two more slabs are read while the first is being written"
    assert len(list(pieces)) == 8 * ROWS // 4 - 1
    assert len(buffered) == 8 * ROWS // 16
    assert max(buffered) <= limit


def test_slab_larger_than_the_buffer_limit_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_BUFFERED_BYTES", 100)
    assert (
        sum(piece.last - piece.first for piece in pipeline.encode_rows(tasks(3), threads=2))
        == 3 * ROWS
    )


@pytest.mark.usefixtures("small_slabs")
def test_one_reader_thread_reads_each_row_once_and_in_order(model: Path, tmp_path: Path) -> None:
    reads: list[tuple[str, int, int]] = []
    readers = set()

    def recorded(weight: Weight) -> Weight:
        def read(first: int, last: int) -> np.ndarray:
            reads.append((weight.name, first, last))
            readers.add(threading.current_thread())
            return weight.read(first, last)

        return replace(weight, read=read)

    quantization = plan(model, recorded)
    write.write_model(quantization, tmp_path / "out.gguf", threads=3)
    assert len(readers) == 1
    assert threading.current_thread() not in readers
    for step in quantization.steps:
        spans = [(first, last) for name, first, last in reads if name == step.weight.name]
        assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
        assert spans[-1][1] == step.weight.rows
    assert list(dict.fromkeys(name for name, _, _ in reads)) == [
        step.weight.name for step in quantization.steps
    ]


def test_closing_the_generator_ends_its_threads() -> None:
    before = threading.active_count()
    pieces = pipeline.encode_rows(tasks(100), threads=3)
    next(pieces)
    pieces.close()
    assert threading.active_count() == before


def with_nan(*names: str) -> Callable[[Weight], Weight]:
    """Return a change that makes the last value of the weights `names` a NaN."""

    def change(weight: Weight) -> Weight:
        def read(first: int, last: int) -> np.ndarray:
            data = weight.read(first, last)
            if last == weight.rows:
                data[-1, -4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
            return data

        return replace(weight, read=read) if weight.name in names else weight

    return change


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("name", ["output.weight", "output_norm.weight"])
def test_nan_in_the_last_tensor_is_refused_and_no_file_remains(
    name: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(DamagedSourceError, match=f"{name} contains NaN"):
        write.write_model(plan(model, with_nan(name)), tmp_path / "out.gguf", threads=2)
    assert not [path.name for path in tmp_path.iterdir() if path.name != "home"]


def test_first_of_several_damaged_tensors_is_reported(model: Path, tmp_path: Path) -> None:
    bad = plan(
        model, with_nan("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_norm.weight")
    )
    for _ in range(5):
        with pytest.raises(DamagedSourceError, match=r"blk\.0\.ffn_norm\.weight contains NaN"):
            write.write_model(bad, tmp_path / "out.gguf", threads=4)


@pytest.mark.usefixtures("small_slabs")
def test_run_resumes_after_a_failed_read(model: Path, tmp_path: Path) -> None:
    expected, out = expected_bytes(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"

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


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("written", [False, True])
def test_run_interrupted_at_any_journal_line_is_resumed(
    written: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, out = expected_bytes(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"
    quantization, write_line = plan(model), resumable_writer.ResumableWriter._write_line
    count, failed = 0, 0
    while True:
        steps = iter(range(count))

        def fail(
            self: resumable_writer.ResumableWriter, entry: dict[str, str | int], steps=steps
        ) -> None:
            if written or next(steps, None) is not None:
                write_line(self, entry)
                if written and next(steps, None) is None:
                    raise KeyboardInterrupt
            else:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(resumable_writer.ResumableWriter, "_write_line", fail)
            try:
                write.write_model(quantization, out, threads=1)
                break
            except KeyboardInterrupt:
                failed += 1
        assert write.write_model(quantization, out, threads=1).resumed_bytes > 0 or count <= 1
        assert out.read_bytes() == expected
        out.unlink()
        count += 1
    assert failed > 30


def test_run_killed_several_times_ends_with_the_same_sha256(model: Path, tmp_path: Path) -> None:
    expected = write.write_model(plan(model), tmp_path / "whole.gguf", threads=1).sha256
    out, killed, rng = tmp_path / "out.gguf", 0, random.Random(7)
    command = [sys.executable, "-c", WAITING_PROGRAM, str(model), str(out)]
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
            for line in stdout:
                last = line.strip()
                if killed < 4 and rng.random() < 0.1:
                    child.kill()
                    break
                if last.isdigit():
                    stdin.write("\n")
                    stdin.flush()
        if child.wait() == 0:
            break
        assert child.returncode == -signal.SIGKILL
        killed += 1
    assert last == expected
    assert killed > 0


def test_sigint_ends_a_hanging_run_and_the_next_run_resumes(model: Path, tmp_path: Path) -> None:
    """The reader thread hangs in a read while the other threads work."""
    expected, out = expected_bytes(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"
    child = subprocess.Popen(
        [sys.executable, "-c", HANGING_PROGRAM, str(model), str(out)],
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


def test_run_resumes_after_ctrl_c(model: Path, tmp_path: Path) -> None:
    expected, out = expected_bytes(model, tmp_path / "whole.gguf"), tmp_path / "out.gguf"

    def interrupt(progress: write.WriteProgress) -> None:
        if progress.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan(model), out, threads=2, on_tensor=interrupt)
    assert write.write_model(plan(model), out, threads=2).resumed == 5
    assert out.read_bytes() == expected
