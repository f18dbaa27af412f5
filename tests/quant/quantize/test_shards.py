"""Sharded models: split as by llama-gguf-split, loaded by their first file, written atomically."""

import itertools
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.errors import UserError
from quant.gguf.header import read_file_header
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.plan import Plan, plan_quantization
from quant.quantize.shards import parse_size
from tests.quant import families, tiny_gguf

MAX_SHARD_BYTES = 200_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("shards") / "tiny.gguf", layers=3)


def plan(model: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> Plan:
    return plan_quantization(write.open_gguf(model), "Q8_0", max_shard_bytes=max_shard_bytes)


def test_shards_have_the_tensors_of_the_single_file(model: Path, tmp_path: Path) -> None:
    single_path, out = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    write.write_model(plan(model, 0), single_path, threads=2)
    report = write.write_model(plan(model), out, threads=2)
    count = len(report.plan.file_plans)
    assert count > 3
    files = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("m", ".")))
    assert files == [f"m-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    assert report.out == tmp_path / files[0]
    assert report.plan.nbytes == sum((tmp_path / file).stat().st_size for file in files)
    single, sharded = read_header.read_header(single_path), read_header.read_header(report.out)
    assert [(t.name, t.shape, t.type) for t in sharded.tensors] == [
        (t.name, t.shape, t.type) for t in single.tensors
    ]
    for single_tensor, shard_tensor in zip(single.tensors, sharded.tensors, strict=True):
        assert np.array_equal(
            *(
                np.fromfile(t.file, np.uint8, t.nbytes, offset=t.offset)
                for t in (single_tensor, shard_tensor)
            )
        )
    assert len(report.type_summaries) == 2 and report.type_summaries[0].error


def test_shards_are_filled_and_numbered(model: Path, tmp_path: Path) -> None:
    quantization = plan(model)
    files = write.write_model(quantization, tmp_path / "m.gguf", threads=1) and quantization.files(
        tmp_path / "m.gguf"
    )
    sizes = [[-(-t.nbytes // 32) * 32 for t in read_file_header(file).tensors] for file in files]
    assert all(sum(shard_sizes) <= MAX_SHARD_BYTES for shard_sizes in sizes)
    assert all(
        sum(shard_sizes) + next_sizes[0] > MAX_SHARD_BYTES
        for shard_sizes, next_sizes in itertools.pairwise(sizes)
    )
    for number, file in enumerate(files):
        fields = gguf.GGUFReader(file).fields
        split_keys = {
            key: (fields[key].contents(), fields[key].types[0].name)
            for key in fields
            if key.startswith("split.")
        }
        assert split_keys == {
            "split.no": (number, "UINT16"),
            "split.count": (len(files), "UINT16"),
            "split.tensors.count": (len(quantization.steps), "INT32"),
        }
        assert ("general.architecture" in fields) == (number == 0)


def test_llama_cpp_loads_all_shards_with_equal_logits(model: Path, tmp_path: Path) -> None:
    write.write_model(plan(model, 0), tmp_path / "whole.gguf", threads=2)
    first = write.write_model(plan(model), tmp_path / "m.gguf", threads=2).out
    tokens = [1, *range(5, 25)]
    assert np.array_equal(
        families.ours(first, tokens), families.ours(tmp_path / "whole.gguf", tokens)
    )


@pytest.mark.parametrize("after", [2, 14, 29])
def test_interrupted_run_resumes_in_its_last_shard(after: int, model: Path, tmp_path: Path) -> None:
    complete, interrupted = tmp_path / "a", tmp_path / "b"
    complete.mkdir()
    interrupted.mkdir()
    write.write_model(plan(model), complete / "m.gguf", threads=1)

    def stop(progress: write.WriteProgress) -> None:
        if progress.index == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan(model), interrupted / "m.gguf", threads=1, on_tensor=stop)
    finished_files = sorted(
        path.name for path in interrupted.iterdir() if not path.name.startswith(".")
    )
    assert all(
        (interrupted / name).read_bytes() == (complete / name).read_bytes()
        for name in finished_files
    )
    indices: list[int] = []
    report = write.write_model(
        plan(model),
        interrupted / "m.gguf",
        threads=1,
        on_tensor=lambda progress: indices.append(progress.index),
    )
    assert indices == list(range(1, len(plan(model).steps) + 1))
    assert report.resumed >= after - 9
    assert {path.name: path.read_bytes() for path in interrupted.iterdir()} == {
        path.name: path.read_bytes() for path in complete.iterdir()
    }


def test_only_missing_shards_are_rewritten(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    write.write_model(plan(model), out, threads=1)
    assert write.write_model(plan(model), out, threads=1).already_finished
    files = plan(model).files(out)
    before = files[0].stat().st_mtime_ns
    lost = files[1].read_bytes()
    files[1].unlink()
    assert not write.is_finished(plan(model), out)
    report = write.write_model(plan(model), out, threads=1)
    assert not report.already_finished and 0 < report.resumed < len(report.plan.steps)
    assert files[1].read_bytes() == lost and files[0].stat().st_mtime_ns == before
    assert not write.write_model(plan(model, MAX_SHARD_BYTES + 32), out, threads=1).already_finished


def test_too_little_disk_space_is_refused_before_the_first_shard(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    usage, need = shutil.disk_usage(tmp_path), plan(model).nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=need - 1))
    with pytest.raises(UserError, match=f"{need - 1:,} bytes free, the .* shards need {need:,}"):
        write.write_model(plan(model), tmp_path / "m.gguf")
    assert not [path for path in tmp_path.iterdir() if path.name != "home"]


def test_a_tensor_larger_than_a_shard_is_refused_by_name(model: Path) -> None:
    with pytest.raises(UserError, match=r"token_embd\.weight alone takes 81,600 bytes") as caught:
        plan(model, 80_000)
    assert "1M" in caught.value.hint


def test_sizes_are_parsed_in_decimal_units() -> None:
    assert [parse_size(text) for text in ("500M", "2g", " 48G ")] == [
        500_000_000,
        2_000_000_000,
        48_000_000_000,
    ]
    for text in ("", "M", "12", "1.5G", "-1G", "0M", "2T", "٣M"):
        with pytest.raises(UserError, match="is no size of a shard"):
            parse_size(text)
