"""A certificate is embedded in a file, read back unchanged, and detects changed bytes."""

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
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(source, tmp_path_factory.mktemp("made") / "tiny-Q4_K_M.gguf")


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    """A finished file of one's own."""
    return Path(shutil.copy(made, tmp_path / made.name))


def write(source: Path, out: Path, kind: str = "Q4_K_M", most: int = 0) -> Path:
    plan = plan_quantization(open_gguf(source), kind, max_shard_bytes=most)
    write_model(plan, out, threads=1)
    return plan.files(out)[0]


def certified(path: Path) -> Certificate:
    """A certificate of a file, with figures that nobody measured."""
    header = read_header.read_header(path)
    tensors = tuple(
        TensorRecord(one.name, one.type, one.nbytes, one.nbytes * 8 / one.elements, 0.25, None)
        for one in header.tensors
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


def test_it_comes_back_as_it_was_written(file: Path) -> None:
    written, before = certified(file), read_header.read_header(file)
    embed.embed_certificate(file, written)
    header = read_header.read_header(file)
    assert certificate.read_certificate(header) == written
    assert certificate.find_mismatches(header, written, all_bytes=True) == ()
    kept = {
        field.key: field.read_raw()
        for field in header.fields
        if field.key != certificate.CERTIFICATE_KEY
    }
    assert kept == {field.key: field.read_raw() for field in before.fields}
    assert [(one.name, one.type, one.shape) for one in header.tensors] == [
        (one.name, one.type, one.shape) for one in before.tensors
    ]


def test_the_gguf_package_reads_the_file_and_its_tensors_are_untouched(
    file: Path, made: Path
) -> None:
    embed.embed_certificate(file, certified(file))
    ours, theirs = gguf.GGUFReader(file), gguf.GGUFReader(made)
    assert json.loads(ours.fields[certificate.CERTIFICATE_KEY].contents())["model"] == "tiny"
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert one.name == other.name
        assert (one.data == other.data).all()


def test_a_second_one_takes_the_place_of_the_first(file: Path) -> None:
    embed.embed_certificate(file, certified(file))
    later = replace(certified(file), model="later")
    embed.embed_certificate(file, later)
    header = read_header.read_header(file)
    assert certificate.read_certificate(header) == later
    assert [field.key for field in header.fields].count(certificate.CERTIFICATE_KEY) == 1


def test_a_certified_file_is_recognised_and_is_the_same_source(source: Path, file: Path) -> None:
    before = open_gguf(file).fingerprint
    embed.embed_certificate(file, certified(file))
    assert is_finished(plan_quantization(open_gguf(source), "Q4_K_M"), file)
    assert open_gguf(file).fingerprint == before


def test_what_is_made_of_a_certified_file_carries_no_certificate(
    file: Path, tmp_path: Path
) -> None:
    embed.embed_certificate(file, certified(file))
    assert (
        certificate.read_certificate(
            read_header.read_header(write(file, tmp_path / "again.gguf", "Q8_0"))
        )
        is None
    )


def test_shards_carry_it_in_the_first_and_it_speaks_of_all(
    source: Path, tmp_path: Path, made: Path
) -> None:
    first = write(source, tmp_path / "tiny.gguf", most=200_000)
    header = read_header.read_header(first)
    assert len(header.files) > 2
    written = certified(first)
    assert (
        written.content.data == certificate.digest_content(read_header.read_header(made)).data
    )  # however the file is cut
    rest = [path.read_bytes() for path in header.files[1:]]
    embed.embed_certificate(first, written)
    header = read_header.read_header(first)
    assert certificate.find_mismatches(header, written, all_bytes=True) == ()
    assert [path.read_bytes() for path in header.files[1:]] == rest
    flip(header.tensors[-1])
    assert certificate.find_mismatches(read_header.read_header(first), written, all_bytes=True)


def flip(tensor: TensorInfo, at: int = 0) -> None:
    """Change one byte of a tensor."""
    with tensor.file.open("r+b") as stream:
        stream.seek(tensor.offset + at)
        (byte,) = stream.read(1)
        stream.seek(tensor.offset + at)
        stream.write(bytes([byte ^ 1]))


def test_one_changed_byte_is_noticed(file: Path) -> None:
    written = certified(file)
    embed.embed_certificate(file, written)
    tensor = max(read_header.read_header(file).tensors, key=lambda one: one.nbytes)
    assert tensor.nbytes > 3 * certificate.SAMPLE_BYTES
    flip(tensor)
    header = read_header.read_header(file)
    assert certificate.find_mismatches(header, written) == ()  # a look does not read that place
    assert certificate.find_mismatches(header, written, all_bytes=True) == (
        "its tensors were changed after they were verified",
    )
    flip(tensor, tensor.nbytes // 2)
    assert certificate.find_mismatches(header, written) == (
        "its tensors are not those that were verified",
    )


def test_the_certificate_of_another_file_is_noticed(
    source: Path, file: Path, tmp_path: Path
) -> None:
    other = tiny_gguf.llama(tmp_path / "other-F32.gguf", layers=2, seed=1)
    same_types = read_header.read_header(write(other, tmp_path / "other-Q4_K_M.gguf"))
    foreign = certified(file)
    told = certificate.find_mismatches(same_types, foreign)
    assert told[0] == "its tensors are not those that were verified"
    assert (
        "its metadata was changed" in told[1]
    )  # quantize wrote another source's fingerprint into it
    other_types = read_header.read_header(write(source, tmp_path / "tiny-Q8_0.gguf", "Q8_0"))
    assert (
        "it names other tensors, or other types or sizes of them: blk.0.attn_k"
        in certificate.find_mismatches(other_types, foreign)[0]
    )


def test_changed_metadata_is_noticed(file: Path) -> None:
    written = certified(file)
    embed.embed_certificate(file, written)
    raw = file.read_bytes()
    at = raw.index(b"llama.attention.head_count_kv") + len(b"llama.attention.head_count_kv") + 4
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    assert certificate.find_mismatches(read_header.read_header(file), written) == (
        "its metadata was changed after it was verified, or was written for another file",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.pop("content"),
        lambda said: said.update(format=2),
        lambda said: said.update(model=1),
        lambda said: said["answers"].update(kld=[]),
        lambda said: said["answers"]["kld"].update(value="0.1"),
        lambda said: said["answers"]["kld"].update(value=True),
        lambda said: said["tensors"].append(7),
        lambda said: said["content"].update(nbytes=2**80),
        lambda said: said.update(model="\ud800"),
        lambda said: said.update(mix=[1]),
    ],
)
def test_what_is_no_certificate_is_refused_in_words(
    file: Path, change: Callable[[dict[str, object]], object]
) -> None:
    said = json.loads(certified(file).to_json())
    change(said)
    fields = tuple(
        replace(field, key=certificate.CERTIFICATE_KEY, value=json.dumps(said))
        if field.key == "general.architecture"
        else field
        for field in read_header.read_header(file).fields
    )
    with pytest.raises(UserError, match=r"the certificate in .* (cannot be read|has format 2)"):
        certificate.read_certificate(replace(read_header.read_header(file), fields=fields))


def test_text_that_is_no_json_or_too_long_is_a_value_error() -> None:
    for text in ("", "[" * 100_000, "NaN", "[]"):
        with pytest.raises(ValueError):  # noqa: PT011 (json's own words)
            parse_json(Certificate, text, 10**6)
    with pytest.raises(ValueError, match="more than 3"):
        parse_json(Certificate, "null", 3)


STEPS = [
    "quant.certificate.embed._copy",
    "os.fsync",
    "shutil.copymode",
    "pathlib.Path.replace",
    "quant.certificate.embed.sync_folder",
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("where", STEPS)
def test_killed_anywhere_the_file_is_what_it_was_or_what_it_should_be(
    file: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, written = file.read_bytes(), certified(file)
    if not (child := os.fork()):  # it leaves as kill -9 would: nothing is cleaned up
        try:
            monkeypatch.setattr(where, lambda *given, **more: os._exit(9))
            embed.embed_certificate(file, written)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if where == STEPS[-1]:  # behind the rename
        assert (
            certificate.find_mismatches(read_header.read_header(file), written, all_bytes=True)
            == ()
        )
    else:
        assert file.read_bytes() == raw
    embed.embed_certificate(file, written)
    assert certificate.read_certificate(read_header.read_header(file)) == written
    assert list(file.parent.glob(".*.stamped")) == []


def test_ctrl_c_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = file.read_bytes()

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quant.certificate.embed._check", stop)
    with pytest.raises(KeyboardInterrupt):
        embed.embed_certificate(file, certified(file))
    assert file.read_bytes() == raw
    assert list(file.parent.glob(".*")) == []


def test_what_a_kill_left_behind_is_overwritten(file: Path) -> None:
    part = file.with_name(f".{file.name}.stamped")
    part.write_bytes(os.urandom(2 * file.stat().st_size))
    embed.embed_certificate(file, certified(file))
    assert (
        certificate.find_mismatches(read_header.read_header(file), certified(file), all_bytes=True)
        == ()
    )
    assert not part.exists()


def test_a_file_that_changed_while_it_was_verified_is_left_alone(file: Path) -> None:
    written = certified(file)
    flip(read_header.read_header(file).tensors[0])
    raw = file.read_bytes()
    with pytest.raises(UserError, match="was changed while it was verified"):
        embed.embed_certificate(file, written)
    assert file.read_bytes() == raw


def test_two_at_once_are_refused_and_a_link_is_not_written_through(
    file: Path, tmp_path: Path
) -> None:
    fcntl = pytest.importorskip("fcntl")
    part = file.with_name(f".{file.name}.stamped")
    with part.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is writing"):
            embed.embed_certificate(file, certified(file))
    part.unlink()
    aim = tmp_path / "aim"
    aim.write_text("mine")
    part.symlink_to(aim)
    with pytest.raises(UserError, match="no ordinary file"):
        embed.embed_certificate(file, certified(file))
    assert aim.read_text() == "mine"


def test_a_full_disk_is_told_before_anything_is_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = file.read_bytes()
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10))
    with pytest.raises(UserError, match="has 10 bytes free"):
        embed.embed_certificate(file, certified(file))
    assert file.read_bytes() == raw
    assert list(file.parent.glob(".*.stamped")) == []


def test_errors_are_those_of_numpy_in_float64(source: Path, made: Path, tmp_path: Path) -> None:
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
        one.weight.name: OriginalTensor(one.weight, one.statistics.importance) for one in plan.steps
    }
    found = {one.name: one for one in tensor_errors(originals, read_header.read_header(made), 2)}
    ours, theirs = (
        {one.name: one for one in gguf.GGUFReader(path).tensors} for path in (source, made)
    )
    for name, deviation in found.items():
        one = ours[name].data.astype(np.float64)
        other = (
            gguf.dequantize(theirs[name].data, theirs[name].tensor_type)
            .astype(np.float64)
            .reshape(one.shape)
        )
        assert deviation.error == pytest.approx(
            np.sqrt(((one - other) ** 2).sum() / (one**2).sum()), rel=1e-5
        )
        if name == "blk.0.attn_q.weight":
            weigh = squares[0].astype(np.float64)
            expected = np.sqrt((weigh * (one - other) ** 2).sum() / (weigh * one**2).sum())
            assert deviation.weighted == pytest.approx(expected, rel=1e-5)
            assert deviation.weighted != pytest.approx(deviation.error, rel=1e-4)
        else:
            assert deviation.weighted is None
