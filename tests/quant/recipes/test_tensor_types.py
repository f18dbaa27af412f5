"""Each tensor has the type and the bytes that llama_model_quantize gives it."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quant.errors import UserError
from quant.model_file import read_header
from quant.native import ggml
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes import file_types, tensor_types
from quant.recipes.tensor_types import TypeOverrides
from tests.quant import tiny_gguf, upstream
from tests.quant.upstream import Settings, thin_model

MODELS: dict[str, Callable[[Path], Path]] = {
    "whole": lambda path: tiny_gguf.llama(path, layers=2),
    "untied": lambda path: thin_model(path, 10),
    "tied": lambda path: thin_model(path, 17, heads=4, kv_heads=1, tied=True, dtype=np.float16),
    "eight experts": lambda path: thin_model(path, 9, experts=8),
    "four experts": lambda path: thin_model(path, 9, experts=4),
    "odd rows": lambda path: thin_model(path, 3, columns=96),
    "odder rows": lambda path: thin_model(path, 3, columns=80),
    "falcon": lambda path: thin_model(path, 17, arch="falcon", kv_heads=1, fused=True),
    "70B": lambda path: thin_model(path, 80, heads=16, kv_heads=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("recipes")

    def get(name: str) -> Path:
        file = folder / f"{name}.gguf"
        return file if file.exists() else MODELS[name](file)

    return get


def assert_same_as_llama_cpp(
    source: Path,
    kind: str,
    folder: Path,
    overrides: TypeOverrides = tensor_types.NO_OVERRIDES,
    settings: Settings | None = None,
) -> None:
    """Assert that both quantizers give the same tensors, or that both refuse."""
    ours, theirs, number = (
        folder / "ours.gguf",
        folder / "theirs.gguf",
        file_types.FILE_TYPES[kind].number,
    )
    succeeded = upstream.quantize(source, theirs, number, settings or Settings())
    if not succeeded:
        with pytest.raises(UserError, match=r"importance matrix|no other type can replace"):
            plan_quantization(write.open_gguf(source), kind, overrides)
        return
    write.write_model(plan_quantization(write.open_gguf(source), kind, overrides), ours, threads=2)
    upstream.assert_same(ours, theirs)


@pytest.mark.parametrize(
    "kind", [kind for kind in file_types.FILE_TYPES if kind not in file_types.OWN_FILE_TYPES]
)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("whole", "70B")])
def test_every_file_type_equals_llama_cpp(name, kind, models, tmp_path) -> None:
    assert_same_as_llama_cpp(models(name), kind, tmp_path)


@pytest.mark.parametrize("kind", file_types.OWN_FILE_TYPES)
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_file_types_that_llama_cpp_lacks_have_its_bytes(name, kind, models, tmp_path) -> None:
    """llama-quantize gets the type of each tensor by its own options, and makes the same tensors."""
    source, ours, theirs = models(name), tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    settings = Settings(
        head="Q6_K",
        embedding="Q6_K" if name == "tied" else kind,
        patterns=(("attn", kind), ("ffn", kind)),
    )
    assert upstream.quantize(source, theirs, file_types.FILE_TYPES["Q4_0"].number, settings)
    write.write_model(plan_quantization(write.open_gguf(source), kind), ours, threads=2)
    assert upstream.tensor_contents(ours) == upstream.tensor_contents(theirs)
    header = read_header.read_header(ours)
    assert header.file_type == kind
    assert header.type_totals[kind][0] > 5


def test_rows_that_nvfp4_does_not_divide_become_mxfp4() -> None:
    assert tensor_types.fit_row_length("NVFP4", 96) == tensor_types.TypeChoice("MXFP4", "NVFP4")
    assert tensor_types.fit_row_length("NVFP4", 100) == tensor_types.TypeChoice("F16", "NVFP4")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q2_K", "TQ1_0"])
def test_large_model_equals_llama_cpp(kind, models, tmp_path) -> None:
    assert_same_as_llama_cpp(models("whole"), kind, tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "overrides", "settings"),
    [
        ("untied", "Q4_K_M", TypeOverrides(head_type="q8_0"), Settings(head="Q8_0")),
        (
            "untied",
            "F16",
            TypeOverrides(head_type="q8_0", embedding_type="q4_0"),
            Settings(head="Q8_0", embedding="Q4_0"),
        ),
        ("tied", "Q4_K_M", TypeOverrides(head_type="f16"), Settings(head="F16")),
        ("tied", "Q4_K_M", TypeOverrides(embedding_type="q5_1"), Settings(embedding="Q5_1")),
        ("untied", "Q3_K_M", TypeOverrides(keep_head=True), Settings(keep_head=True)),
        ("untied", "IQ4_XS", TypeOverrides(pure=True), Settings(pure=True)),
        (
            "eight experts",
            "Q4_K_M",
            TypeOverrides(("attn_v=iq4_nl", r"ffn_.*=tq2_0", "attn_k=iq3_s")),
            Settings(patterns=(("attn_v", "IQ4_NL"), ("ffn_.*", "TQ2_0"), ("attn_k", "IQ3_S"))),
        ),
        (
            "odd rows",
            "Q4_0",
            TypeOverrides(("ffn_up=mxfp4",), pure=True),
            Settings(patterns=(("ffn_up", "MXFP4"),), pure=True),
        ),
        (
            "untied",
            "Q4_0",
            TypeOverrides(("ffn_up=mxfp4", "attn_k=nvfp4"), pure=True),
            Settings(patterns=(("ffn_up", "MXFP4"), ("attn_k", "NVFP4")), pure=True),
        ),
    ],
)
def test_overrides_equal_llama_cpp(name, kind, overrides, settings, models, tmp_path) -> None:
    assert_same_as_llama_cpp(models(name), kind, tmp_path, overrides, settings)


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K_M"])
def test_value_weights_of_a_70b_model_get_the_bits_of_llama_cpp(kind, models, tmp_path) -> None:
    assert_same_as_llama_cpp(models("70B"), kind, tmp_path)


@pytest.mark.model
@pytest.mark.parametrize(
    "kind", [kind for kind in file_types.FILE_TYPES if re.match("Q[3-8]_|Q2_K$", kind)]
)
def test_released_model_is_quantized_as_by_llama_cpp(kind, smollm2, tmp_path) -> None:
    assert_same_as_llama_cpp(smollm2, kind, tmp_path)


def test_tensors_are_ordered_by_layer_and_name() -> None:
    names = [
        "blk.10.a.weight",
        "output.weight",
        "blk.2.b.weight",
        "blk.2.a.weight",
        "token_embd.weight",
    ]
    assert sorted(names, key=tensor_types.tensor_order) == [
        "output.weight",
        "token_embd.weight",
        "blk.2.a.weight",
        "blk.2.b.weight",
        "blk.10.a.weight",
    ]


def test_file_type_names_are_parsed_in_any_case_with_llama_cpps_short_names() -> None:
    assert [
        tensor_types.parse_file_type(text).name
        for text in ("q4_k", "Q4_K_M", "q3-k", "q5_K", " f16 ")
    ] == [
        "Q4_K_M",
        "Q4_K_M",
        "Q3_K_M",
        "Q5_K_M",
        "F16",
    ]


def test_unknown_type_error_suggests_the_nearest_names() -> None:
    with pytest.raises(UserError, match="no type 'q4_m'") as caught:
        tensor_types.parse_file_type("q4_m")
    assert "Q4_K_M" in caught.value.hint


def test_pattern_overrides_the_recipe_and_pure_has_one_type(models) -> None:
    source = write.open_gguf(models("untied"))
    plan = plan_quantization(source, "Q4_K_M", TypeOverrides(("attn_v=q8_0", "attn_.*=q6_k")))
    types = {step.weight.name: step.type for step in plan.steps}
    chosen = [types[f"blk.0.attn_{role}.weight"] for role in ("v", "q", "norm")]
    assert chosen == ["Q8_0", "Q6_K", "F32"]
    pure = {
        step.type for step in plan_quantization(source, "Q4_K_M", TypeOverrides(pure=True)).steps
    }
    assert pure == {"Q4_K", "F32"}


EXPENSIVE_PATTERNS = ["a{99999999999}=q8_0", "(" * 5000 + ")" * 5000 + "=q8_0"]


@pytest.mark.parametrize(
    "text",
    ["attn_v", "=q8_0", "attn(=q8_0", "attn_v=q9", *EXPENSIVE_PATTERNS],
    ids=lambda text: text[:12],
)
def test_invalid_pattern_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        tensor_types.parse_overrides([text])


def test_writable_types_are_those_of_ggml() -> None:
    rows = np.random.default_rng(2).normal(0, 1, (2, 512)).astype(np.float32)
    uniform = ggml.Importance(np.ones((1, 512), np.float32), 2)
    for name in file_types.TENSOR_TYPES:
        codes = ggml.encode(rows, name, label=name, importance=uniform)
        assert np.abs(ggml.decode(codes, name, 512, label=name) - rows).mean() < 0.7, name
    not_writable = ggml.TYPE_NUMBERS.keys() - set(file_types.TENSOR_TYPES) - ggml.INTEGER_TYPES
    assert not_writable == {"F64", "Q8_1", "Q8_K"}  # F64, and two types for activations only


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tied", TypeOverrides(keep_head=True), "--leave-output-tensor has no effect"),
        ("tied", TypeOverrides(head_type="q8_0", pure=True), "--output-tensor-type has no effect"),
        ("untied", TypeOverrides(head_type="q8_0", keep_head=True), "cannot both keep its type"),
        ("untied", TypeOverrides(head_type="q9"), "no tensor type 'q9'"),
        ("untied", TypeOverrides(embedding_type="iq2_xxs"), r"token_embd.weight \(IQ2_XXS\)"),
        (
            "untied",
            TypeOverrides(("ffn_up=iq1_m",)),
            "needs an importance matrix: without one 10 tensors",
        ),
    ],
)
def test_impossible_override_is_refused(
    name: str, overrides: TypeOverrides, message: str, models
) -> None:
    with pytest.raises(UserError, match=message):
        plan_quantization(write.open_gguf(models(name)), "Q4_K_M", overrides)


def test_mxfp4_is_copied_unless_a_pattern_overrides_it(models, tmp_path) -> None:
    first = tmp_path / "first.gguf"
    write.write_model(
        plan_quantization(write.open_gguf(models("eight experts")), "MXFP4_MOE"),
        first,
        threads=2,
    )
    name = "blk.0.ffn_up_exps.weight"
    for overrides, kind in (
        (tensor_types.NO_OVERRIDES, "MXFP4"),
        (TypeOverrides(("exps=q4_k",)), "Q4_K"),
    ):
        plan = plan_quantization(write.open_gguf(first), "Q4_K_M", overrides)
        assert {step.type for step in plan.steps if step.weight.name == name} == {kind}
