"""The mixtures at full size: types by role and layer, held against llama.cpp's own choice and its
snapshot files.

llama_quant_compute_types (llama-ext.h) chooses for named shapes without a weight; it is C++ and
known here by its mangled name, so these tests are skipped where another compiler made the library.
"""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

from quant.native import ggml as native
from quant.recipes import tensor_types
from quant.recipes.file_types import FILE_TYPES, ModelFacts
from tests.quant.upstream import QUIET

Shapes = dict[str, tuple[int, ...]]
SNAPSHOTS = Path(os.environ.get("LLMCLI_LLAMA_SOURCE", "")) / "tests" / "snapshots"
WRITABLE = [name for name in FILE_TYPES if name not in ("F32", "F16", "BF16")]


class Desc(ctypes.Structure):
    """struct llama_quant_model_desc."""

    _fields_ = [("architecture", ctypes.c_char_p)] + [
        (name, ctypes.c_uint32)
        for name in ("embd", "ff", "layers", "heads", "kv_heads", "experts", "head_k", "head_v")
    ]


def dense(
    layers: int, columns: int = 2048, ff: int = 5120, *, tied: bool = False, fused: bool = False
) -> Shapes:
    attention = ("attn_qkv",) if fused else ("attn_q", "attn_k", "attn_v")
    shapes: Shapes = {"token_embd.weight": (columns, 999), "output_norm.weight": (columns,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.{name}.weight": (columns, 512)
            for name in (*attention, "attn_output", "ffn_gate")
        }
        shapes |= {
            f"blk.{i}.ffn_up.weight": (columns, ff),
            f"blk.{i}.ffn_down.weight": (ff, columns),
        }
    return shapes if tied else shapes | {"output.weight": (columns, 999)}


def experts(layers: int, count: int, columns: int = 2048, ff: int = 1536) -> Shapes:
    shapes = {name: shape for name, shape in dense(layers, columns).items() if "ffn_" not in name}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.ffn_{name}_exps.weight": (columns, ff, count) for name in ("gate", "up")
        }
        shapes |= {
            f"blk.{i}.ffn_down_exps.weight": (ff, columns, count),
            f"blk.{i}.ffn_gate_inp.weight": (columns, 8),
        }
        shapes |= {
            f"blk.{i}.ffn_{name}_shexp.weight": (columns, ff) for name in ("gate", "up", "down")
        }
        shapes |= {
            f"blk.{i}.attn_k_b.weight": (128, 512, 16),
            f"blk.{i}.attn_kv_b.weight": (512, 4096),
        }
    return shapes


def glm5(layers: int) -> Shapes:
    names = (
        "attn_q_a",
        "attn_q_b",
        "ssm_f_a",
        "hc_attn",
        "indexer.proj",
        "attn_k_b",
        "nextn.eh_proj",
    )
    return experts(layers, 16) | {
        f"blk.{i}.{name}.weight": (2048, 64) for i in range(layers) for name in names
    }


MODELS: dict[str, tuple[ModelFacts, Shapes]] = {
    "llama": (ModelFacts("llama", 33, 32, 32, 0), dense(33)),
    "llama, grouped": (ModelFacts("llama", 16, 32, 8, 0), dense(16)),
    "tied": (ModelFacts("qwen3", 28, 16, 8, 0), dense(28, tied=True)),
    "fused": (ModelFacts("phi3", 17, 16, 16, 0), dense(17, fused=True)),
    "falcon": (ModelFacts("falcon", 34, 64, 1, 0), dense(34, fused=True)),
    "70B": (ModelFacts("llama", 80, 64, 8, 0), dense(80)),
    "odd rows": (ModelFacts("qwen2", 24, 14, 2, 0), dense(24, 896, 4864)),
    "odder rows": (ModelFacts("llama", 9, 9, 3, 0), dense(9, 576, 1520)),
    "no attention": (ModelFacts("mamba", 24, 0, 0, 0), dense(24)),
    "eight experts": (ModelFacts("llama", 32, 32, 8, 8), experts(32, 8)),
    "four experts": (ModelFacts("llama", 17, 32, 32, 4), experts(17, 4)),
    "many experts": (ModelFacts("deepseek2", 27, 16, 16, 64), experts(27, 64)),
    "bailingmoe3": (ModelFacts("bailingmoe3", 20, 16, 4, 256), experts(20, 256)),
    "glm5-next": (ModelFacts("glm5-next", 12, 16, 16, 16), glm5(12)),
}


@pytest.fixture(scope="module")
def upstream() -> Callable[[ModelFacts, Shapes, str], dict[str, str]]:
    """The types of what may be quantized, as llama.cpp chooses them; an empty table where it
    refuses.
    """
    folder = Path(llama_cpp.__file__).parent / "lib"
    lib, ggml = ctypes.CDLL(str(folder / "libllama.so")), native.open_library()
    if not hasattr(lib, "_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc"):
        pytest.skip(
            "this libllama does not export llama_quant_compute_types under the name known here"
        )
    make, start, allowed, types, stop = (
        getattr(lib, name)
        for name in (
            "_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc",
            "_Z16llama_quant_initPK11llama_modelPK27llama_model_quantize_params",
            "_Z38llama_quant_tensor_allows_quantizationPK19quantize_state_implPK11ggml_tensor",
            "_Z25llama_quant_compute_typesP19quantize_state_impl11llama_ftypePP11ggml_tensorP9ggml_typem",
            "_Z16llama_quant_freeP19quantize_state_impl",
        )
    )
    make.restype = start.restype = ggml.ggml_init.restype = ggml.ggml_new_tensor_4d.restype = (
        ctypes.c_void_p
    )
    allowed.restype = ctypes.c_bool

    class Init(ctypes.Structure):
        _fields_ = [
            ("size", ctypes.c_size_t),
            ("buffer", ctypes.c_void_p),
            ("no_alloc", ctypes.c_bool),
        ]

    ggml.ggml_init.argtypes = [Init]
    ggml.ggml_new_tensor_4d.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4]
    ggml.ggml_set_name.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    types.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]

    def choose(facts: ModelFacts, shapes: Shapes, kind: str) -> dict[str, str]:
        llama_cpp.llama_log_set(QUIET, None)  # one that stays: llama.cpp goes on calling it
        desc = Desc(
            facts.architecture.encode(),
            2048,
            5120,
            facts.layers,
            facts.heads,
            facts.kv_heads,
            facts.experts,
        )
        model = ctypes.c_void_p(make(ctypes.byref(desc)))
        params = llama_cpp.llama_model_quantize_default_params()
        state = ctypes.c_void_p(start(model, ctypes.byref(params)))
        context = ggml.ggml_init(Init(len(shapes) * 512 + 4096, None, True))
        kept, names = [], []
        for name in sorted(shapes, key=tensor_types.tensor_order):
            tensor = ggml.ggml_new_tensor_4d(context, 0, *(*shapes[name], 1, 1, 1)[:4])
            ggml.ggml_set_name(tensor, name.encode())
            if allowed(state, ctypes.c_void_p(tensor)):
                kept.append(tensor)
                names.append(name)
        found = (ctypes.c_int * len(kept))()
        types(
            state, FILE_TYPES[kind].number, (ctypes.c_void_p * len(kept))(*kept), found, len(kept)
        )
        stop(state)
        ggml.ggml_free(ctypes.c_void_p(context))
        return dict(zip(names, (native.TYPE_NAMES[number] for number in found), strict=True))

    return choose


def ours(facts: ModelFacts, shapes: Shapes, kind: str) -> dict[str, str]:
    """Our choice for what may be quantized, as if every type were allowed without an imatrix."""
    tensors = [(name, shape, "F32") for name, shape in shapes.items()]
    chosen = tensor_types.assign_types(tensors, FILE_TYPES[kind], facts)
    return {
        name: chosen[name].type
        for name, shape in shapes.items()
        if tensor_types.is_quantizable(name, shape, facts)
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_file_type_of_every_kind_of_model_is_llama_cpps(model: str, upstream) -> None:
    facts, shapes = MODELS[model]
    for kind in WRITABLE:
        if kind == "Q1_0" and "odd" in model:
            continue  # llama.cpp throws: nothing stands in for its blocks of 128
        assert ours(facts, shapes, kind) == upstream(facts, shapes, kind), kind


def sections(file: Path) -> dict[str, dict[str, str]]:
    """[Q4_K_M] -> {tensor: type}; only tensors whose type is not the default are there."""
    found: dict[str, dict[str, str]] = {}
    for line in file.read_text().splitlines():
        if match := re.match(r"\[(\w+)\]", line):
            here = found.setdefault(match[1], {})
        elif line and not line.startswith("#"):
            name, kind = line.rsplit(" ", 1)
            here[name] = kind.upper()
    return found


def rebuilt(file: Path) -> tuple[ModelFacts, Shapes]:
    """The model behind a snapshot: its first lines, and names and row lengths as its sections imply
    them.

    A row is a multiple of 256 where TQ1_0 did not fall back; a matrix is stacked where MXFP4_MOE
    took it.
    """
    parts = sections(file)
    numbers = {key: int(value) for key, value in re.findall(r"n_(\w+)=(\d+)", file.read_text())}
    names = {name for part in parts.values() for name in part}
    for name in [
        name for name in names if "_down_exps" in name
    ]:  # its siblings are named only where they differ
        names |= {
            other
            for role in ("up", "gate")
            for other in [name.replace("down", role)]
            if any(f"ffn_{role}_exps" in known for known in names)
        }
    shapes: Shapes = {}
    for name in names:
        columns = 32 if parts["TQ1_0"].get(name) in ("Q4_0", "Q5_0", "Q8_0") else 256
        shapes[name] = (
            (columns, 64) if name in parts["MXFP4_MOE"] or "embd" in name else (columns, 64, 4)
        )
    architecture = {"meta-llama-3.1-70b-instruct": "llama"}.get(file.stem, file.stem.split("-")[0])
    return ModelFacts(
        architecture,
        numbers["layer"],
        numbers["head"],
        numbers["head_kv"],
        numbers.get("expert", 0),
    ), shapes


@pytest.mark.skipif(
    not SNAPSHOTS.is_dir(), reason="LLMCLI_LLAMA_SOURCE does not name llama.cpp's source"
)
@pytest.mark.parametrize(
    "file", sorted(SNAPSHOTS.glob("*.schema")) or [None], ids=lambda file: file and file.stem
)
def test_llama_cpps_snapshots_are_met(file: Path) -> None:
    facts, shapes = rebuilt(file)
    for kind, listed in sections(file).items():
        default = FILE_TYPES[kind].default_type
        expected = {name: listed.get(name, default) for name in shapes}
        if native.is_quantized(default):
            assert ours(facts, shapes, kind) == expected, kind
