"""Plan files, which give each tensor its type: written, read, and refused if invalid."""

import json
from pathlib import Path
from typing import Any

import pytest

from quant.errors import UserError
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes import tensor_types
from quant.recipes.plan_file import TypeMix, load_plan_file, nearest_file_type
from quant.recipes.tensor_types import TypeOverrides
from tests.quant import tiny_gguf

TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q5_0", "Q3_K")


def make_mix(path: Path) -> TypeMix:
    source = write.open_gguf(path)
    names = [
        w.name for w in source.weights if tensor_types.is_quantizable(w.name, w.shape, source.facts)
    ]
    types = {name: TYPES[i % len(TYPES)] for i, name in enumerate(names)}
    return TypeMix(
        source.fingerprint, types, {"method": "ggml"}, source.name, 1, {}, {"target": "90M"}
    )


def test_plan_file_round_trips(tmp_path: Path) -> None:
    mix = make_mix(tiny_gguf.llama(tmp_path / "m.gguf", layers=1))
    (tmp_path / "plan.json").write_bytes(mix.to_json())
    loaded = load_plan_file(tmp_path / "plan.json")
    assert (loaded.types, loaded.fingerprint, loaded.settings) == (
        mix.types,
        mix.fingerprint,
        mix.settings,
    )
    assert loaded.to_json() == mix.to_json()


def test_mix_gives_its_types_and_a_finished_file_is_recognized(tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=1)
    mix, source, out = make_mix(path), write.open_gguf(path), tmp_path / "o.gguf"
    kind = nearest_file_type(mix.types, {w.name: w.elements for w in source.weights})
    plan = plan_quantization(source, kind, TypeOverrides(mix=mix.types))
    write.write_model(plan, out)
    written_types = {w.name: w.type for w in write.open_gguf(out).weights}
    assert {name: written_types[name] for name in mix.types} == mix.types
    assert out.stat().st_size == plan.nbytes
    assert write.is_finished(plan_quantization(source, kind, TypeOverrides(mix=mix.types)), out)
    other_types = dict(mix.types) | {"output.weight": "Q2_K"}
    assert not write.is_finished(
        plan_quantization(source, kind, TypeOverrides(mix=other_types)), out
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.9.attn_q.weight": "Q4_K"}, "no quantizable tensor blk.9.attn_q.weight"),
        ({"output_norm.weight": "Q4_K"}, "has no quantizable tensor output_norm.weight"),
        ({"blk.0.attn_q.weight": None}, "has no type for blk.0.attn_q.weight"),
    ],
)
def test_a_mix_of_other_tensors_is_refused(
    tmp_path: Path, change: dict[str, str | None], message: str
) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=1)
    types = {name: kind for name, kind in (make_mix(path).types | change).items() if kind}
    with pytest.raises(UserError, match=message):
        plan_quantization(write.open_gguf(path), "Q4_K_M", TypeOverrides(mix=types))


def test_type_that_does_not_divide_the_rows_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=1, hidden=96, ff=256)
    with pytest.raises(UserError, match="rows of 96 are no multiple of the blocks of Q4_K"):
        plan_quantization(
            write.open_gguf(path),
            "Q4_K_M",
            TypeOverrides(mix=dict.fromkeys(make_mix(path).types, "Q4_K")),
        )


def test_mix_and_other_overrides_are_exclusive(tmp_path: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=1)
    with pytest.raises(UserError, match="decides every tensor's type"):
        plan_quantization(
            write.open_gguf(path), "Q4_K_M", TypeOverrides(mix=make_mix(path).types, pure=True)
        )


VALID_PLAN: dict[str, Any] = {
    "format": "llmcli.plan",
    "version": 1,
    "source": "abc",
    "steered": {"method": "ggml"},
    "tensors": {"a.weight": {"type": "Q4_K"}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is no plan file"),
        ({"version": 2}, "of version 2"),
        ({"version": True}, "of version True"),
        ({"source": 5}, "its source or settings are missing"),
        ({"steered": ["ggml"]}, "its source or settings are missing"),
        ({"file_bytes": "1"}, "its source or settings are missing"),
        ({"tensors": {}}, "lists no tensors"),
        ({"tensors": ["a"]}, "lists no tensors"),
        ({"tensors": {"a": {"type": "Q9_9"}}}, "'a' has an unknown type: 'Q9_9'"),
        ({"tensors": {"a": "Q4_K"}}, "'a' has an unknown type: None"),
        ({"tensors": {"a": {"type": ["Q4_K"]}}}, "has an unknown type"),
    ],
)
def test_invalid_plan_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(VALID_PLAN | change))
    with pytest.raises(UserError, match=message):
        load_plan_file(path)


@pytest.mark.parametrize(
    "raw", [b"", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"format": "llmcli.plan"']
)
def test_invalid_json_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(raw)
    with pytest.raises(UserError):
        load_plan_file(tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot read"):
        load_plan_file(tmp_path / "nothing.json")


def test_plan_requires_its_source_and_settings() -> None:
    mix = TypeMix("abc", {"a": "Q4_K"}, {"method": "search", "imatrix": "12"}, "m")
    mix.require_match("abc", {"imatrix": "12", "method": "search"})
    for fingerprint, settings, message in [
        ("abd", {"method": "search", "imatrix": "12"}, "another source"),
        ("abc", {"method": "ggml", "imatrix": "12"}, "method search, this run has method ggml"),
        ("abc", {"method": "search"}, "imatrix 12, this run has no imatrix"),
        (
            "abc",
            {"method": "search", "imatrix": "12", "moments": "5"},
            "no moments, this run has moments 5",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            mix.require_match(fingerprint, settings)
