"""GGUF headers are read as by the gguf package, and invalid files give a one-line error."""

import contextlib
import os
import shutil
import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.errors import UserError
from quant.gguf.header import GgufArray
from quant.model_file import load_checks, read_header
from quant.model_file.load_checks import (
    ARCHS_WITH_CONVOLUTION_BIAS,
    ARCHS_WITH_ONE_HEAD_SIZE,
    ARCHS_WITH_ONE_KEY_SIZE,
)
from tests.quant import tiny_gguf

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "fuzz"))
import header as fuzz_header


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(
        tmp_path_factory.mktemp("header") / "tiny.gguf", hidden=32, ff=64, layers=2
    )


def test_keys_and_tensors_equal_those_of_the_gguf_package(model: Path) -> None:
    header, reader = read_header.read_header(model), gguf.GGUFReader(model)
    for key, value in header.metadata.items():
        expected = reader.fields[key].contents()
        assert (value.read_values() if isinstance(value, GgufArray) else value) == expected
    assert [(t.name, t.shape, t.type, t.nbytes, t.offset) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type.name, t.n_bytes, t.data_offset)
        for t in reader.tensors
    ]


def test_exhausted_memory_is_not_called_a_missing_permission(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("quant.gguf.header.mmap.mmap", fail)
    with pytest.raises(UserError, match="Cannot allocate memory") as caught:
        read_header.read_header(model)
    assert "ulimit -v unlimited" in caught.value.hint


def test_header_describes_the_model(model: Path) -> None:
    header = read_header.read_header(model)
    assert (header.architecture, header.context_length, header.tokenizer) == ("llama", 64, "llama")
    assert not header.has_template
    assert (header.file_type, header.bits_per_weight) == ("F32", 32.0)
    assert sum(count for count, _ in header.type_totals.values()) == len(header.tensors)


@pytest.mark.model
def test_header_of_a_released_model(smollm2: Path) -> None:
    header = read_header.read_header(smollm2)
    load_checks.check_loadable(header)
    assert (header.parameters, header.file_type, header.tokenizer) == (134515008, "Q4_1", "gpt2")
    assert header.has_template
    assert header.type_totals == {
        "Q8_0": (1, 30081024),
        "F32": (61, 140544),
        "Q4_1": (210, 66355200),
    }


def test_truncated_file_is_refused_at_every_length(model: Path, tmp_path: Path) -> None:
    data, cut = model.read_bytes(), tmp_path / "cut.gguf"
    end = read_header.read_header(model).tensors[0].offset
    for length in [*range(0, end, 7), end, len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(UserError):
            read_header.read_header(cut)


def test_error_of_a_truncated_file_names_tensor_and_bytes(model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-1000])
    with pytest.raises(
        UserError, match=r"truncated: tensor \S+ ends at byte \d+, the file has \d+"
    ):
        read_header.read_header(cut)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "byte order is reversed"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version is 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims 1152921504606846976 keys"),
        (b"", "has 0 bytes"),
    ],
)
def test_invalid_file_gives_a_one_line_error(first: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(first)
    with pytest.raises(UserError, match=message) as caught:
        read_header.read_header(file)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_a_name_of_half_the_file_is_shortened_in_the_error(tmp_path: Path) -> None:
    """A damaged length makes a key of everything that follows."""
    name = b"k" * 5000
    file = tmp_path / "x.gguf"
    file.write_bytes(
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(name)) + name + struct.pack("<I", 99)
    )
    with pytest.raises(UserError, match=r"key 'k+…' has unknown type number 99") as caught:
        read_header.read_header(file)
    assert len(str(caught.value)) < 300 + len(str(file))


def test_array_with_an_impossible_length_is_refused(tmp_path: Path) -> None:
    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<IIQ", 9, 5, 2**61)
    )
    file = tmp_path / "x.gguf"
    file.write_bytes(head + bytes(64))
    with pytest.raises(UserError, match="claims 2305843009213693952 elements"):
        read_header.read_header(file)


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        (8, 400_000_000, "claims 400000000 strings"),
        (4, 400_000_000, "its header ends beyond 268435456 bytes, after key 'k'"),
    ],
)
def test_array_in_a_hole_of_the_file_is_refused_unread(
    kind: int, count: int, message: str, tmp_path: Path
) -> None:
    entry = ("k", struct.pack("<IIQ", 9, kind, count))
    file = write_keys_only(tmp_path / "x.gguf", LLAMA, entry, zero_bytes=9 * count)
    tracemalloc.start()
    with pytest.raises(UserError, match=message):
        read_header.read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


LLAMA = ("general.architecture", struct.pack("<IQ", 8, 5) + b"llama")


def write_keys_only(file: Path, *entries: tuple[str, bytes], zero_bytes: int = 0) -> Path:
    """Write a GGUF file with these keys, no tensors, and `zero_bytes` bytes of zeros at its end."""
    from quant.gguf.layout import lay_out_file

    file.write_bytes(lay_out_file(entries, [], 32).header)
    os.truncate(file, file.stat().st_size + zero_bytes)
    return file


@pytest.mark.parametrize("key", ["block_count", "expert_used_count", "attention.head_count"])
def test_long_array_is_not_read_for_a_single_number(key: str, tmp_path: Path) -> None:
    count = 1 << 26
    numbers = (f"llama.{key}", struct.pack("<IIQ", 9, 0, count) + b"\7")
    header = read_header.read_header(
        write_keys_only(tmp_path / "x.gguf", LLAMA, numbers, zero_bytes=count)
    )
    tracemalloc.start()
    assert header.get_int(key) == 7
    with contextlib.suppress(UserError):
        load_checks.check_loadable(header)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_array_of_strings_is_not_read_as_a_number(tmp_path: Path) -> None:
    tokens = ("llama.expert_used_count", struct.pack("<IIQQ", 9, 8, 1, 1) + b"x")
    header = read_header.read_header(write_keys_only(tmp_path / "x.gguf", LLAMA, tokens))
    assert header.get_int("expert_used_count") is None
    load_checks.check_loadable(header)


def test_vocabulary_with_too_many_tokens_is_refused_unread(tmp_path: Path) -> None:
    count = (1 << 22) + 1
    kind = ("tokenizer.ggml.model", struct.pack("<IQ", 8, 4) + b"gpt2")
    tokens = ("tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 8, count))
    header = read_header.read_header(
        write_keys_only(tmp_path / "x.gguf", LLAMA, kind, tokens, zero_bytes=8 * count)
    )
    with pytest.raises(UserError, match=f"its vocabulary has {count} tokens"):
        load_checks.check_loadable(header)


@pytest.mark.parametrize(("tensors", "keys"), [(0, 1 << 17), (1 << 21, 0)])
def test_impossible_counts_of_keys_and_tensors_are_refused(
    tensors: int, keys: int, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys))
    os.truncate(file, 1 << 27)
    with pytest.raises(UserError, match=f"it claims {tensors or keys} "):
        read_header.read_header(file)


def split(model: Path, folder: Path, shards: int) -> list[Path]:
    """Write the model in `shards` files with the gguf package, and return their paths."""
    reader, files = gguf.GGUFReader(model), []
    for shard in range(shards):
        files.append(folder / f"m-{shard + 1:05}-of-{shards:05}.gguf")
        writer = gguf.GGUFWriter(files[-1], "llama")
        for name, value in (("no", shard), ("count", shards)):
            writer.add_uint16(f"split.{name}", value)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[shard::shards]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def test_first_shard_opens_all_shards(model: Path, tmp_path: Path) -> None:
    first, *others = split(model, tmp_path, 3)
    header = read_header.read_header(first)
    assert header.files == (first, *others)
    assert sorted(t.name for t in header.tensors) == sorted(
        t.name for t in read_header.read_header(model).tensors
    )


def test_a_missing_or_wrong_shard_is_refused(model: Path, tmp_path: Path) -> None:
    first, second, third = split(model, tmp_path, 3)
    with pytest.raises(UserError, match="part 2 of 3") as caught:
        read_header.read_header(second)
    assert str(first) in caught.value.hint
    third.unlink()
    with pytest.raises(UserError, match=r"1 of its 3 parts are missing: m-00003-of-00003\.gguf"):
        read_header.read_header(first)
    shutil.copy(second, third)
    with pytest.raises(UserError, match=r"it has tensor .* twice"):
        read_header.read_header(first)


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("llama.block_count", "uint32", 4096, "block_count is 4096"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            "float32",
            -1.0,
            "layer_norm_rms_epsilon is -1.0",
        ),
        ("llama.expert_used_count", "uint32", 3, "uses 3 of 0 experts"),
        ("llama.rope.scaling.type", "string", "spiral", "rope scaling 'spiral' is unknown"),
        ("llama.attention.head_count", "uint32", 0, "its attention has no heads"),
        ("llama.expert_gating_func", "uint32", 5, "expert_gating_func is 5; 0 to 4 are allowed"),
    ],
)
def test_values_that_would_abort_llama_cpp_are_refused(
    key: str, kind: str, value: float | str, message: str, model: Path, tmp_path: Path
) -> None:
    from quant.gguf.layout import encode_entry, lay_out_file
    from quant.quantize import write

    source, file = write.open_gguf(model), tmp_path / "bad.gguf"
    entries = [(name, blob) for name, blob in source.entries if name != key] + [
        (key, encode_entry(kind, value))
    ]
    plan = lay_out_file(entries, [(w.name, w.shape, w.type) for w in source.weights], 32)
    file.write_bytes(plan.header.ljust(plan.nbytes, b"\0"))
    with pytest.raises(UserError, match=f"would crash llama.cpp: .*{message}"):
        load_checks.check_loadable(read_header.read_header(file))


LATENT = {
    "attention.head_count": 8,
    "attention.head_count_kv": 1,
    "embedding_length": 256,
    "rope.dimension_count": 32,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.key_length_mla": 80,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": 2}, "its compressed keys have 2 heads"),
        ({"attention.key_length": 128}, "its compressed keys have 128 values"),
        ({"attention.key_length_mla": 32}, "its full keys 32, of which 32 are rotary"),
    ],
)
def test_inconsistent_deepseek2_head_sizes_are_refused(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    from quant.gguf.layout import encode_entry

    files = []
    for sizes in (LATENT, LATENT | changes):
        keys = [
            (f"deepseek2.{name}", encode_entry("uint32", value)) for name, value in sizes.items()
        ]
        kind = ("general.architecture", encode_entry("string", "deepseek2"))
        files.append(
            read_header.read_header(write_keys_only(tmp_path / f"{len(files)}.gguf", kind, *keys))
        )
    load_checks.check_loadable(files[0])
    with pytest.raises(UserError, match=message):
        load_checks.check_loadable(files[1])


def test_gpt_oss_heads_of_several_sizes_are_refused(tmp_path: Path) -> None:
    from quant.gguf.layout import encode_entry

    sizes = {"head_count": 8, "key_length": 64, "value_length": 8}
    keys = [
        (f"gpt-oss.attention.{name}", encode_entry("uint32", value))
        for name, value in sizes.items()
    ]
    keys.append(("gpt-oss.embedding_length", encode_entry("uint32", 256)))
    file = write_keys_only(
        tmp_path / "x.gguf", ("general.architecture", encode_entry("string", "gpt-oss")), *keys
    )
    with pytest.raises(UserError, match="its heads have several sizes"):
        load_checks.check_loadable(read_header.read_header(file))


@pytest.mark.parametrize("arch", sorted(ARCHS_WITH_CONVOLUTION_BIAS))
def test_convolutions_without_a_bias_that_the_graph_adds_are_refused(
    arch: str, tmp_path: Path
) -> None:
    from quant.gguf.layout import encode_entry, lay_out_file

    kind, file = ("general.architecture", encode_entry("string", arch)), tmp_path / "x.gguf"
    names = [f"blk.{layer}.ssm_conv1d.{part}" for layer in range(5) for part in ("weight", "bias")]
    for tensors in (names, [name for name in names if name.endswith("weight")]):
        plan = lay_out_file([kind], [(name, (8,), "F32") for name in tensors], 32)
        file.write_bytes(plan.header.ljust(plan.nbytes, b"\0"))
        if tensors is names:
            load_checks.check_loadable(read_header.read_header(file))
    with pytest.raises(
        UserError, match=r"crash llama.cpp: tensor blk.0.ssm_conv1d.bias is missing.*and 2 more"
    ) as caught:
        load_checks.check_loadable(read_header.read_header(file))
    assert "\n" not in str(caught.value)


HEAD = {"embedding_length": 256, "attention.head_count": 8}


@pytest.mark.parametrize(
    ("arch", "changed_sizes", "message"),
    [
        *(
            (arch, {"rope.dimension_count": 16}, "rope.dimension_count 16")
            for arch in sorted(ARCHS_WITH_ONE_HEAD_SIZE)
        ),
        *(
            (arch, {"attention.value_length": 64}, "value_length 64")
            for arch in sorted(ARCHS_WITH_ONE_KEY_SIZE)
        ),
        ("exaone4", {"rope.dimension_count_swa": 16}, "rope.dimension_count_swa 16"),
    ],
)
def test_different_head_sizes_are_refused_where_the_graph_needs_one(
    arch: str, changed_sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    from quant.gguf.layout import encode_entry

    kind = ("general.architecture", encode_entry("string", arch))
    for number, sizes in enumerate((HEAD, HEAD | changed_sizes)):
        keys = [(f"{arch}.{name}", encode_entry("uint32", value)) for name, value in sizes.items()]
        header = read_header.read_header(write_keys_only(tmp_path / f"{number}.gguf", kind, *keys))
        if sizes is HEAD:
            load_checks.check_loadable(header, is_draft=True)
            continue
        with pytest.raises(UserError, match=rf"its heads have several sizes \(.*{message}\)"):
            load_checks.check_loadable(header, is_draft=True)


@pytest.mark.parametrize("tokens", [["a", "a\0b"], ["[EMPTY_1]", "\0a"]])
def test_tokens_equal_up_to_a_zero_byte_are_refused_as_repeated(
    tokens: list[str], tmp_path: Path
) -> None:
    from quant.gguf.layout import encode_entry

    kind = ("tokenizer.ggml.model", encode_entry("string", "gpt2"))
    file = write_keys_only(
        tmp_path / "x.gguf",
        LLAMA,
        kind,
        ("tokenizer.ggml.tokens", encode_entry("array:string", tokens)),
    )
    with pytest.raises(UserError, match="its vocabulary repeats 1 tokens"):
        load_checks.check_loadable(read_header.read_header(file))


@pytest.mark.parametrize("kind", ["spm", "bpe", "experts", "gemma3"])
def test_files_that_pass_the_checks_do_not_crash_llama_cpp(kind: str, tmp_path: Path) -> None:
    small = {"hidden": 32, "ff": 64, "layers": 2}
    make = {
        "spm": lambda path: tiny_gguf.llama(path, **small),
        "bpe": lambda path: tiny_gguf.llama(path, **small, vocab=-300),
        "experts": lambda path: tiny_gguf.llama(path, **small, experts=4),
        "gemma3": tiny_gguf.gemma3,
    }[kind]
    outcomes = fuzz_header.run(make(tmp_path / "tiny.gguf"), count=60, seed=5)
    assert [outcome for outcome in outcomes if outcome.verdict.startswith("died")] == []
    assert (
        len({outcome.verdict for outcome in outcomes}) == 2
    )  # some files are refused, and llama.cpp loads the others
