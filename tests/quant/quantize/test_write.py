"""A quantized file is written completely or not at all, and interrupted runs are resumed."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.errors import UserError
from quant.gguf import resumable_writer
from quant.model_file import load_checks, read_header
from quant.quantize import output_files, pipeline, write
from quant.quantize.plan import SETTINGS_KEY, SOURCE_KEY, plan_quantization
from tests.quant import tiny_gguf

KILLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
from quant.quantize.plan import plan_quantization
from quant.quantize.write import open_gguf, write_model

def watch(progress):
    if progress.index == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

plan = plan_quantization(open_gguf(Path(sys.argv[1])), "Q4_K_M")
write_model(plan, Path(sys.argv[2]), threads=1, on_tensor=watch)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("quantize") / "tiny.gguf", layers=3)


def make(model: Path, out: Path, kind: str = "Q4_K_M", **settings: bool) -> write.WriteReport:
    return write.write_model(
        plan_quantization(write.open_gguf(model), kind), out, threads=1, **settings
    )


def names(folder: Path) -> list[str]:
    """Return the names of all files in a folder, without the "home" folder of the test."""
    return sorted(path.name for path in folder.iterdir() if path.name != "home")


def kill(model: Path, out: Path, after: int) -> None:
    """Quantize the model in a process that kills itself with SIGKILL after `after` tensors."""
    command = [sys.executable, "-c", KILLED_PROGRAM, str(model), str(out), str(after)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("after", [1, 9, 30])
def test_killed_run_is_resumed_with_the_same_bytes(after: int, model: Path, tmp_path: Path) -> None:
    complete, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    make(model, complete)
    kill(model, out, after)
    assert not out.exists()
    report = make(model, out)
    assert report.resumed == after
    assert report.sha256 == hashlib.sha256(complete.read_bytes()).hexdigest()
    assert out.read_bytes() == complete.read_bytes()
    assert names(tmp_path) == ["out.gguf", "whole.gguf"]


def test_tensor_damaged_by_a_power_cut_is_rewritten(model: Path, tmp_path: Path) -> None:
    complete, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    make(model, complete)
    kill(model, out, 9)
    tensor = read_header.read_header(complete).tensors[4]
    with (tmp_path / ".out.gguf.part").open("r+b") as part:
        part.seek(tensor.offset)
        part.write(b"lost")
    assert make(model, out).resumed == 4  # the tensors after the damaged one are also discarded
    assert out.read_bytes() == complete.read_bytes()


def test_journal_with_a_truncated_line_is_read_up_to_it(model: Path, tmp_path: Path) -> None:
    complete, out, journal = (
        tmp_path / "whole.gguf",
        tmp_path / "out.gguf",
        tmp_path / ".out.gguf.journal",
    )
    make(model, complete)
    kill(model, out, 9)
    journal.write_bytes(journal.read_bytes()[:-20])
    kill(model, out, 12)  # entries written after the truncated line are valid
    assert make(model, out).resumed == 12
    assert out.read_bytes() == complete.read_bytes()


def test_interrupted_run_with_other_settings_is_not_resumed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    kill(model, out, 9)
    assert make(model, out, "Q8_0").resumed == 0
    assert read_header.read_header(out).file_type == "Q8_0"


def test_finished_file_of_the_same_source_and_settings_is_unchanged(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    make(model, out)
    before = out.stat()
    assert make(model, out).already_finished
    after = out.stat()  # the access time may differ
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )
    assert not make(model, out, force=True).already_finished
    assert out.stat().st_ino != before.st_ino


def test_file_of_another_source_or_type_is_rewritten(model: Path, tmp_path: Path) -> None:
    other, out = tiny_gguf.llama(tmp_path / "other.gguf", layers=3, seed=1), tmp_path / "out.gguf"
    make(model, out)
    assert not make(other, out).already_finished
    assert not make(other, out, "Q5_K_M").already_finished
    assert read_header.read_header(out).file_type == "Q5_K_M"


def test_too_little_disk_space_is_refused_before_any_write(model, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out.gguf"
    plan = plan_quantization(write.open_gguf(model), "Q4_K_M")
    need = plan.layout.nbytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=need - 1))
    with pytest.raises(UserError, match=f"{need - 1:,} bytes free, out.gguf needs {need:,}"):
        write.write_model(plan, out, threads=1)
    assert names(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=need))
    write.write_model(plan, out, threads=1)
    assert out.stat().st_size == need


def test_partial_file_counts_as_free_space_and_survives_a_refusal(
    model, tmp_path, monkeypatch
) -> None:
    out, part = tmp_path / "out.gguf", tmp_path / ".out.gguf.part"
    kill(model, out, 9)
    plan = plan_quantization(write.open_gguf(model), "Q8_0")
    need, part_bytes = plan.layout.nbytes, part.stat().st_blocks * 512
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: usage._replace(free=need - part_bytes - 1)
    )
    with pytest.raises(UserError, match="bytes free"):
        write.write_model(plan, out, threads=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=need - part_bytes))
    assert make(model, out).resumed == 9
    part.write_bytes(bytes(part_bytes))
    free = need - part.stat().st_blocks * 512
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=free))
    assert make(model, out, "Q8_0").resumed == 0


def test_full_disk_keeps_the_old_file_and_can_be_resumed(model, tmp_path, monkeypatch) -> None:
    out, complete = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    make(model, complete)
    out.write_bytes(b"precious")
    append, count = resumable_writer.ResumableWriter.append, iter(range(6))

    def full(self, data):
        if next(count, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(resumable_writer.ResumableWriter, "append", full)
        with pytest.raises(UserError, match="the disk is full"):
            make(model, out, force=True)
    assert out.read_bytes() == b"precious"
    assert make(model, out, force=True).resumed == 5
    assert out.read_bytes() == complete.read_bytes()


def test_damaged_source_leaves_only_the_old_file(tmp_path: Path) -> None:
    path, out = tmp_path / "nan.gguf", tmp_path / "out.gguf"
    tiny_gguf.llama(path, layers=2)
    tensor = next(
        t for t in read_header.read_header(path).tensors if t.name == "blk.1.ffn_up.weight"
    )
    with path.open("r+b") as stream:
        stream.seek(tensor.offset + 400)
        stream.write(np.array([np.nan], np.float32).tobytes())
    out.write_bytes(b"precious")
    with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight contains NaN"):
        make(path, out, force=True)
    assert out.read_bytes() == b"precious"
    assert names(tmp_path) == ["nan.gguf", "out.gguf"]


def test_a_file_of_someone_else_is_replaced_only_by_force(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    for content in (b"precious", model.read_bytes()):
        out.write_bytes(content)
        with pytest.raises(UserError, match="exists and was not made by llmcli") as raised:
            make(model, out)
        assert "--force" in raised.value.hint
        assert out.read_bytes() == content
    make(model, out, force=True)
    mine = out.read_bytes()
    with model.open("ab") as source:  # another source: a file of ours is made again
        source.write(bytes(32))
    assert not make(model, out).already_finished
    out.write_bytes(b"")  # as mktemp makes it
    make(model, out)
    assert len(out.read_bytes()) == len(mine)


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("hub/models--org--some-model/snapshots/0a1b/x.gguf", "org/some-model"),
        ("hub/models--org--x/blobs/x.gguf", "org/x"),
        ("hub/models--gpt2/snapshots/0a1b/sub/x.gguf", "gpt2"),
        ("hub/models--org--x/x.gguf", ""),
        ("snapshots/x.gguf", ""),
    ],
)
def test_paths_in_the_hugging_face_cache_are_recognized(
    tmp_path: Path, name: str, repo: str
) -> None:
    assert output_files.cached_repo(tmp_path / name) == repo


def test_names_of_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the name of a shard") as raised:
        output_files.require_output_name(tmp_path / "big-00001-of-00003.gguf")
    assert raised.value.hint == f"-o {tmp_path / 'big.gguf'}"
    with pytest.raises(UserError, match="in the Hugging Face cache of org/x"):
        output_files.require_output_name(tmp_path / "models--org--x" / "snapshots" / "x.gguf")
    output_files.require_output_name(tmp_path / "big-1-of-3.gguf")


def test_source_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    for out in (model, link):
        with pytest.raises(UserError, match="is the source itself"):
            make(model, out)


def test_invalid_output_paths_are_refused(model: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for out, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.gguf", "there is no folder"),
        (pipe, "is no ordinary file"),
    ):
        with pytest.raises(UserError, match=message):
            make(model, out)
    assert pipe.is_fifo()


def test_second_writer_of_a_file_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    plan = plan_quantization(write.open_gguf(model), "Q4_K_M")
    with resumable_writer.ResumableWriter(out, plan.layout, {}).open():
        with pytest.raises(UserError, match="another process is writing"):
            write.write_model(plan, out, threads=1)


def test_keys_are_copied_and_three_are_added(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    make(model, out)
    old, new = gguf.GGUFReader(model), gguf.GGUFReader(out)
    copied = [
        key for key in old.fields if not key.startswith("GGUF.") and key != "general.file_type"
    ]
    assert [new.fields[key].contents() for key in copied] == [
        old.fields[key].contents() for key in copied
    ]
    added = {key: new.fields[key].contents() for key in new.fields if key not in old.fields}
    assert added.keys() == {
        "general.quantization_version",
        SOURCE_KEY,
        SETTINGS_KEY,
    }
    assert (added["general.quantization_version"], new.fields["general.file_type"].contents()) == (
        2,
        15,
    )


def test_slabs_and_threads_do_not_change_the_bytes(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    complete, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    make(model, complete)
    monkeypatch.setattr(pipeline, "SLAB_VALUES", 3000)
    monkeypatch.setattr(pipeline, "PIECE_VALUES", 700)
    write.write_model(plan_quantization(write.open_gguf(model), "Q4_K_M"), out, threads=3)
    assert out.read_bytes() == complete.read_bytes()


def test_a_split_source_becomes_one_file(model: Path, tmp_path: Path) -> None:
    from tests.quant.gguf.test_header import split

    first = split(model, tmp_path, 3)[0]
    out = tmp_path / "one.gguf"
    plan = plan_quantization(write.open_gguf(first), "Q8_0")
    write.write_model(plan, out, threads=1)
    header = read_header.read_header(out)
    assert len(header.tensors) == len(read_header.read_header(model).tensors)
    assert not any(key.startswith("split.") for key in header.metadata)
    assert plan.source.name == "m"


def test_requantized_types_and_their_error_are_reported(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    make(model, first, "Q5_1")
    plan = plan_quantization(write.open_gguf(first), "Q4_0")
    assert plan.requantized_types == ("Q5_1",)
    report = write.write_model(plan, second, threads=1)
    error = next(line.error for line in report.type_summaries if line.type == "Q4_0")
    name = "blk.0.ffn_up.weight"
    before, after = (
        next(t for t in gguf.GGUFReader(path).tensors if t.name == name) for path in (first, second)
    )
    a, b = (gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in (before, after))
    assert error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=0.05)


def test_progress_names_every_tensor_once_in_order(model: Path, tmp_path: Path) -> None:
    seen: list[write.WriteProgress] = []
    plan = plan_quantization(write.open_gguf(model), "Q4_K_M")
    write.write_model(plan, tmp_path / "out.gguf", threads=1, on_tensor=seen.append)
    assert [item.index for item in seen] == list(range(1, len(plan.steps) + 1))
    assert [item.step for item in seen] == list(plan.steps)


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vocab.gguf"
    out = gguf.GGUFWriter(file, "llama")
    tiny_gguf.vocabulary(out, 300)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    with pytest.raises(UserError, match="a vocabulary but no tensors"):
        write.open_gguf(file)


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("imatrix", r"not a model but statistics of one \(imatrix\)", "--imatrix"),
        ("llmcli.moments", r"not a model but statistics of one \(llmcli.moments\)", "--moments"),
        ("model", "names no architecture", "llmcli show"),
    ],
)
def test_statistics_files_are_refused_as_models(
    kind: str, message: str, hint: str, tmp_path: Path
) -> None:
    """Statistics files are refused by quantize and before loading into llama.cpp."""
    file = tmp_path / "sums.gguf"
    out = gguf.GGUFWriter(file, "")
    out.add_type(kind)
    out.add_tensor("blk.0.ffn_up.weight.in_sum2", np.ones((1, 64), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    for refused in (
        write.open_gguf,
        lambda path: load_checks.check_loadable(read_header.read_header(path)),
    ):
        with pytest.raises(UserError, match=message) as problem:
            refused(file)
        assert hint in (problem.value.hint or "")
