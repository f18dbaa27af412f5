"""A certificate is embedded in a GGUF file, read back unchanged, and detects changed bytes."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.calibration.imatrix import load_imatrix
from quant.certificate import certificate, embed
from quant.certificate.certificate import (
    AnswerMetrics,
    CalibrationRecord,
    Certificate,
    CertifiedEstimate,
    CertifiedSource,
    Environment,
    SpeedComparison,
    TensorRecord,
)
from quant.certificate.tensor_errors import OriginalTensor, tensor_errors
from quant.errors import UserError
from quant.gguf.header import TensorInfo
from quant.json_dataclasses import parse_json
from quant.model_file import read_header
from quant.quantize.plan import plan_quantization
from quant.quantize.write import is_finished, open_gguf, write_model
from tests.quant import tiny_gguf

FIGURE = CertifiedEstimate(1.5, 0.25)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("source") / "tiny-F32.gguf", layers=2)


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(source, tmp_path_factory.mktemp("quantized") / "tiny-Q4_K_M.gguf")


@pytest.fixture
def file(quantized: Path, tmp_path: Path) -> Path:
    """A copy of the quantized file that a test may change."""
    return Path(shutil.copy(quantized, tmp_path / quantized.name))


def write(source: Path, out: Path, kind: str = "Q4_K_M", max_shard_bytes: int = 0) -> Path:
    plan = plan_quantization(open_gguf(source), kind, max_shard_bytes=max_shard_bytes)
    write_model(plan, out, threads=1)
    return plan.files(out)[0]


def example_certificate(path: Path) -> Certificate:
    """Return a certificate for the tensors of a file, with invented measurements."""
    header = read_header.read_header(path)
    tensors = tuple(
        TensorRecord(
            tensor.name, tensor.type, tensor.nbytes, tensor.nbytes * 8 / tensor.elements, 0.25, None
        )
        for tensor in header.tensors
    )
    answers = AnswerMetrics(
        "a text ✓",
        "0" * 64,
        512,
        4,
        1020,
        "F32",
        FIGURE,
        FIGURE,
        FIGURE,
        FIGURE,
        0.5,
        {"99.9": 2.0},
        3.0,
        FIGURE,
        FIGURE,
    )
    return Certificate(
        certificate.FORMAT_VERSION,
        "tiny",
        "Q4_K_M",
        "ggml",
        "{}",
        CertifiedSource("tiny-F32.gguf", "f" * 32, ("F32",), 1, 32.0),
        certificate.digest_content(header),
        Environment("0", "0", "a machine", 1, "2026-11-22T00:00:00Z"),
        answers,
        (CalibrationRecord("imatrix", "d", ("calibration.txt",), (), 3, None),),
        (),
        {"Q4_K": 3},
        tensors,
        (SpeedComparison("tg32", 10.0, 20.0, (9.0, 11.0), (19.0, 21.0), 2.0, None, None, 12),),
    )


def test_certificate_is_read_back_unchanged(file: Path) -> None:
    written, before = example_certificate(file), read_header.read_header(file)
    embed.embed_certificate(file, written)
    header = read_header.read_header(file)
    assert certificate.read_certificate(header) == written
    assert certificate.find_mismatches(header, written, all_bytes=True) == ()
    other_fields = {
        field.key: field.read_raw()
        for field in header.fields
        if field.key != certificate.CERTIFICATE_KEY
    }
    assert other_fields == {field.key: field.read_raw() for field in before.fields}
    assert [(tensor.name, tensor.type, tensor.shape) for tensor in header.tensors] == [
        (tensor.name, tensor.type, tensor.shape) for tensor in before.tensors
    ]


def test_gguf_package_reads_the_certified_file_with_unchanged_tensors(
    file: Path, quantized: Path
) -> None:
    embed.embed_certificate(file, example_certificate(file))
    ours, theirs = gguf.GGUFReader(file), gguf.GGUFReader(quantized)
    assert json.loads(ours.fields[certificate.CERTIFICATE_KEY].contents())["model"] == "tiny"
    for our_tensor, their_tensor in zip(ours.tensors, theirs.tensors, strict=True):
        assert our_tensor.name == their_tensor.name
        assert (our_tensor.data == their_tensor.data).all()


def test_second_certificate_replaces_the_first(file: Path) -> None:
    embed.embed_certificate(file, example_certificate(file))
    later = replace(example_certificate(file), model="later")
    embed.embed_certificate(file, later)
    header = read_header.read_header(file)
    assert certificate.read_certificate(header) == later
    assert [field.key for field in header.fields].count(certificate.CERTIFICATE_KEY) == 1


def test_certified_file_counts_as_finished_and_keeps_its_fingerprint(
    source: Path, file: Path
) -> None:
    before = open_gguf(file).fingerprint
    embed.embed_certificate(file, example_certificate(file))
    assert is_finished(plan_quantization(open_gguf(source), "Q4_K_M"), file)
    assert open_gguf(file).fingerprint == before


def test_quantizing_a_certified_file_drops_its_certificate(file: Path, tmp_path: Path) -> None:
    embed.embed_certificate(file, example_certificate(file))
    assert (
        certificate.read_certificate(
            read_header.read_header(write(file, tmp_path / "again.gguf", "Q8_0"))
        )
        is None
    )


def test_certificate_in_the_first_shard_covers_all_shards(
    source: Path, tmp_path: Path, quantized: Path
) -> None:
    first = write(source, tmp_path / "tiny.gguf", max_shard_bytes=200_000)
    header = read_header.read_header(first)
    assert len(header.files) > 2
    written = example_certificate(first)
    assert (
        written.content.data == certificate.digest_content(read_header.read_header(quantized)).data
    )  # the digest does not depend on the split into shards
    other_shards = [path.read_bytes() for path in header.files[1:]]
    embed.embed_certificate(first, written)
    header = read_header.read_header(first)
    assert certificate.find_mismatches(header, written, all_bytes=True) == ()
    assert [path.read_bytes() for path in header.files[1:]] == other_shards
    flip(header.tensors[-1])
    assert certificate.find_mismatches(read_header.read_header(first), written, all_bytes=True)


def flip(tensor: TensorInfo, offset: int = 0) -> None:
    """Change one bit of the tensor's byte at `offset`, in its file."""
    with tensor.file.open("r+b") as stream:
        stream.seek(tensor.offset + offset)
        (byte,) = stream.read(1)
        stream.seek(tensor.offset + offset)
        stream.write(bytes([byte ^ 1]))


def test_one_changed_byte_is_detected(file: Path) -> None:
    written = example_certificate(file)
    embed.embed_certificate(file, written)
    tensor = max(read_header.read_header(file).tensors, key=lambda tensor: tensor.nbytes)
    assert tensor.nbytes > 3 * certificate.SAMPLE_BYTES
    flip(tensor)
    header = read_header.read_header(file)
    assert (
        certificate.find_mismatches(header, written) == ()
    )  # the sampled bytes do not include this one
    assert certificate.find_mismatches(header, written, all_bytes=True) == (
        "its tensors were changed after they were verified",
    )
    flip(tensor, tensor.nbytes // 2)
    assert certificate.find_mismatches(header, written) == (
        "its tensors are not those that were verified",
    )


def test_certificate_of_another_file_is_detected(source: Path, file: Path, tmp_path: Path) -> None:
    other = tiny_gguf.llama(tmp_path / "other-F32.gguf", layers=2, seed=1)
    same_types = read_header.read_header(write(other, tmp_path / "other-Q4_K_M.gguf"))
    foreign = example_certificate(file)
    mismatches = certificate.find_mismatches(same_types, foreign)
    assert mismatches[0] == "its tensors are not those that were verified"
    assert (
        "its metadata was changed" in mismatches[1]
    )  # the metadata holds the fingerprint of another source
    other_types = read_header.read_header(write(source, tmp_path / "tiny-Q8_0.gguf", "Q8_0"))
    assert (
        "it names other tensors, or other types or sizes of them: blk.0.attn_k"
        in certificate.find_mismatches(other_types, foreign)[0]
    )


def test_changed_metadata_is_detected(file: Path) -> None:
    written = example_certificate(file)
    embed.embed_certificate(file, written)
    raw = file.read_bytes()
    value_offset = (
        raw.index(b"llama.attention.head_count_kv") + len(b"llama.attention.head_count_kv") + 4
    )
    file.write_bytes(raw[:value_offset] + bytes([raw[value_offset] ^ 1]) + raw[value_offset + 1 :])
    assert certificate.find_mismatches(read_header.read_header(file), written) == (
        "its metadata was changed after it was verified, or was written for another file",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("content"),
        lambda document: document.update(format=2),
        lambda document: document.update(model=1),
        lambda document: document["answers"].update(kld=[]),
        lambda document: document["answers"]["kld"].update(value="0.1"),
        lambda document: document["answers"]["kld"].update(value=True),
        lambda document: document["tensors"].append(7),
        lambda document: document["content"].update(nbytes=2**80),
        lambda document: document.update(model="\ud800"),
        lambda document: document.update(mix=[1]),
    ],
)
def test_invalid_certificate_is_refused(
    file: Path, change: Callable[[dict[str, object]], object]
) -> None:
    document = json.loads(example_certificate(file).to_json())
    change(document)
    fields = tuple(
        replace(field, key=certificate.CERTIFICATE_KEY, value=json.dumps(document))
        if field.key == "general.architecture"
        else field
        for field in read_header.read_header(file).fields
    )
    with pytest.raises(UserError, match=r"the certificate in .* (cannot be read|has format 2)"):
        certificate.read_certificate(replace(read_header.read_header(file), fields=fields))


def test_invalid_or_too_long_json_is_a_value_error() -> None:
    for text in ("", "[" * 100_000, "NaN", "[]"):
        with pytest.raises(ValueError):  # noqa: PT011 (the message is that of json)
            parse_json(Certificate, text, 10**6)
    with pytest.raises(ValueError, match="more than 3"):
        parse_json(Certificate, "null", 3)


WRITE_STEPS = [
    "quant.certificate.embed._copy",
    "os.fsync",
    "shutil.copymode",
    "pathlib.Path.replace",
    "quant.certificate.embed.sync_folder",
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("step", WRITE_STEPS)
def test_after_a_kill_at_any_step_the_file_is_old_or_certified(
    file: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, written = file.read_bytes(), example_certificate(file)
    if not (child := os.fork()):  # os._exit cleans nothing up, like kill -9
        try:
            monkeypatch.setattr(step, lambda *args, **kwargs: os._exit(9))
            embed.embed_certificate(file, written)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if step == WRITE_STEPS[-1]:  # after the rename
        assert (
            certificate.find_mismatches(read_header.read_header(file), written, all_bytes=True)
            == ()
        )
    else:
        assert file.read_bytes() == raw
    embed.embed_certificate(file, written)
    assert certificate.read_certificate(read_header.read_header(file)) == written
    assert list(file.parent.glob(".*.stamped")) == []


def test_ctrl_c_leaves_no_temporary_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = file.read_bytes()

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quant.certificate.embed._check", stop)
    with pytest.raises(KeyboardInterrupt):
        embed.embed_certificate(file, example_certificate(file))
    assert file.read_bytes() == raw
    assert list(file.parent.glob(".*")) == []


def test_temporary_file_of_a_killed_process_is_overwritten(file: Path) -> None:
    part = file.with_name(f".{file.name}.stamped")
    part.write_bytes(os.urandom(2 * file.stat().st_size))
    embed.embed_certificate(file, example_certificate(file))
    assert (
        certificate.find_mismatches(
            read_header.read_header(file), example_certificate(file), all_bytes=True
        )
        == ()
    )
    assert not part.exists()


def test_file_changed_during_verification_is_not_certified(file: Path) -> None:
    written = example_certificate(file)
    flip(read_header.read_header(file).tensors[0])
    raw = file.read_bytes()
    with pytest.raises(UserError, match="was changed while it was verified"):
        embed.embed_certificate(file, written)
    assert file.read_bytes() == raw


def test_second_writer_is_refused_and_a_link_is_not_followed(file: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    part = file.with_name(f".{file.name}.stamped")
    with part.open("wb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is writing"):
            embed.embed_certificate(file, example_certificate(file))
    part.unlink()
    target = tmp_path / "aim"
    target.write_text("mine")
    part.symlink_to(target)
    with pytest.raises(UserError, match="no ordinary file"):
        embed.embed_certificate(file, example_certificate(file))
    assert target.read_text() == "mine"


def test_full_disk_is_reported_before_any_write(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = file.read_bytes()
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10))
    with pytest.raises(UserError, match="has 10 bytes free"):
        embed.embed_certificate(file, example_certificate(file))
    assert file.read_bytes() == raw
    assert list(file.parent.glob(".*.stamped")) == []


def test_tensor_errors_equal_numpy_in_float64(
    source: Path, quantized: Path, tmp_path: Path
) -> None:
    matrix = tmp_path / "imatrix.gguf"
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(matrix, "imatrix")
    writer.add_array("imatrix.datasets", ["a text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    squares = random.uniform(0.1, 4, (1, 256)).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", squares)
    writer.add_tensor("blk.0.attn_q.weight.counts", np.full((1, 1), 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plan = plan_quantization(open_gguf(source), "Q4_K_M", imatrix=load_imatrix(matrix))
    originals = {
        step.weight.name: OriginalTensor(step.weight, step.statistics.importance)
        for step in plan.steps
    }
    errors = {
        error.name: error
        for error in tensor_errors(originals, read_header.read_header(quantized), 2)
    }
    ours, theirs = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (source, quantized)
    )
    for name, deviation in errors.items():
        original = ours[name].data.astype(np.float64)
        decoded = (
            gguf.dequantize(theirs[name].data, theirs[name].tensor_type)
            .astype(np.float64)
            .reshape(original.shape)
        )
        assert deviation.error == pytest.approx(
            np.sqrt(((original - decoded) ** 2).sum() / (original**2).sum()), rel=1e-5
        )
        if name == "blk.0.attn_q.weight":
            importance = squares[0].astype(np.float64)
            expected = np.sqrt(
                (importance * (original - decoded) ** 2).sum() / (importance * original**2).sum()
            )
            assert deviation.weighted == pytest.approx(expected, rel=1e-5)
            assert deviation.weighted != pytest.approx(deviation.error, rel=1e-4)
        else:
            assert deviation.weighted is None
