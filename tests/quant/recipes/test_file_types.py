"""The types that file types assign to models of full size, compared with llama.cpp and its
snapshots.

llama_quant_compute_types (llama-ext.h) needs only the names and shapes of tensors. It is a C++
function that the tests find by its mangled name, so they are skipped if another compiler built
the library.
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
from quant.recipes.file_types import FILE_TYPES, OWN_FILE_TYPES, ModelFacts
from tests.quant.upstream import SILENT_LOG

Shapes = dict[str, tuple[int, ...]]
SNAPSHOTS = Path(os.environ.get("LLMCLI_LLAMA_SOURCE", "")) / "tests" / "snapshots"
QUANTIZED_FILE_TYPES = [
    name for name in FILE_TYPES if name not in ("F32", "F16", "BF16", *OWN_FILE_TYPES)
]


class ModelDescription(ctypes.Structure):
    """The C struct llama_quant_model_desc."""

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
def llama_cpp_types() -> Callable[[ModelFacts, Shapes, str], dict[str, str]]:
    """A function that returns llama.cpp's type of each quantizable tensor by name, for the facts,
    the shapes and the file type of a model.
    """
    folder = Path(llama_cpp.__file__).parent / "lib"
    lib, ggml = ctypes.CDLL(str(folder / "libllama.so")), native.open_library()
    if not hasattr(lib, "_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc"):
        pytest.skip(
            "this libllama does not export llama_quant_compute_types under the name known here"
        )
    make_model, init_state, allows_quantization, compute_types, free_state = (
        getattr(lib, name)
        for name in (
            "_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc",
            "_Z16llama_quant_initPK11llama_modelPK27llama_model_quantize_params",
            "_Z38llama_quant_tensor_allows_quantizationPK19quantize_state_implPK11ggml_tensor",
            "_Z25llama_quant_compute_typesP19quantize_state_impl11llama_ftypePP11ggml_tensorP9ggml_typem",
            "_Z16llama_quant_freeP19quantize_state_impl",
        )
    )
    make_model.restype = init_state.restype = ggml.ggml_init.restype = (
        ggml.ggml_new_tensor_4d.restype
    ) = ctypes.c_void_p
    allows_quantization.restype = ctypes.c_bool

    class Init(ctypes.Structure):
        _fields_ = [
            ("size", ctypes.c_size_t),
            ("buffer", ctypes.c_void_p),
            ("no_alloc", ctypes.c_bool),
        ]

    ggml.ggml_init.argtypes = [Init]
    ggml.ggml_new_tensor_4d.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4]
    ggml.ggml_set_name.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    compute_types.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]

    def choose(facts: ModelFacts, shapes: Shapes, kind: str) -> dict[str, str]:
        llama_cpp.llama_log_set(SILENT_LOG, None)  # a global: llama.cpp keeps a pointer to it
        description = ModelDescription(
            facts.architecture.encode(),
            2048,
            5120,
            facts.layers,
            facts.heads,
            facts.kv_heads,
            facts.experts,
        )
        model = ctypes.c_void_p(make_model(ctypes.byref(description)))
        params = llama_cpp.llama_model_quantize_default_params()
        state = ctypes.c_void_p(init_state(model, ctypes.byref(params)))
        context = ggml.ggml_init(Init(len(shapes) * 512 + 4096, None, True))
        tensors, names = [], []
        for name in sorted(shapes, key=tensor_types.tensor_order):
            tensor = ggml.ggml_new_tensor_4d(context, 0, *(*shapes[name], 1, 1, 1)[:4])
            ggml.ggml_set_name(tensor, name.encode())
            if allows_quantization(state, ctypes.c_void_p(tensor)):
                tensors.append(tensor)
                names.append(name)
        type_numbers = (ctypes.c_int * len(tensors))()
        compute_types(
            state,
            FILE_TYPES[kind].number,
            (ctypes.c_void_p * len(tensors))(*tensors),
            type_numbers,
            len(tensors),
        )
        free_state(state)
        ggml.ggml_free(ctypes.c_void_p(context))
        return dict(zip(names, (native.TYPE_NAMES[number] for number in type_numbers), strict=True))

    return choose


def our_types(facts: ModelFacts, shapes: Shapes, kind: str) -> dict[str, str]:
    """Return our type of each quantizable tensor by name, without the check for an imatrix."""
    tensors = [(name, shape, "F32") for name, shape in shapes.items()]
    types = tensor_types.assign_types(tensors, FILE_TYPES[kind], facts)
    return {
        name: types[name].type
        for name, shape in shapes.items()
        if tensor_types.is_quantizable(name, shape, facts)
    }


@pytest.mark.parametrize("model", MODELS)
def test_types_equal_those_of_llama_cpp(model: str, llama_cpp_types) -> None:
    facts, shapes = MODELS[model]
    for kind in QUANTIZED_FILE_TYPES:
        if kind == "Q1_0" and "odd" in model:
            continue  # llama.cpp throws an error: no other type replaces Q1_0 in these rows
        assert our_types(facts, shapes, kind) == llama_cpp_types(facts, shapes, kind), kind


def parse_snapshot(file: Path) -> dict[str, dict[str, str]]:
    """Parse a snapshot file of llama.cpp: for each file type, the tensors with their types.

    Tensors of the file type's default type are not listed.
    """
    sections: dict[str, dict[str, str]] = {}
    for line in file.read_text().splitlines():
        if match := re.match(r"\[(\w+)\]", line):
            section = sections.setdefault(match[1], {})
        elif line and not line.startswith("#"):
            name, kind = line.rsplit(" ", 1)
            section[name] = kind.upper()
    return sections


def model_of_snapshot(file: Path) -> tuple[ModelFacts, Shapes]:
    """Reconstruct the facts and the tensor shapes of a snapshot's model.

    The facts are in the first lines. Rows are multiples of 256 unless TQ1_0 has a fallback type,
    and a tensor has stacked matrices if MXFP4_MOE quantizes it to MXFP4.
    """
    sections = parse_snapshot(file)
    numbers = {key: int(value) for key, value in re.findall(r"n_(\w+)=(\d+)", file.read_text())}
    names = {name for section in sections.values() for name in section}
    for name in [
        name for name in names if "_down_exps" in name
    ]:  # its siblings are named only where they differ
        names |= {
            sibling
            for role in ("up", "gate")
            for sibling in [name.replace("down", role)]
            if any(f"ffn_{role}_exps" in existing for existing in names)
        }
    shapes: Shapes = {}
    for name in names:
        columns = 32 if sections["TQ1_0"].get(name) in ("Q4_0", "Q5_0", "Q8_0") else 256
        shapes[name] = (
            (columns, 64) if name in sections["MXFP4_MOE"] or "embd" in name else (columns, 64, 4)
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
def test_types_equal_the_snapshots_of_llama_cpp(file: Path) -> None:
    facts, shapes = model_of_snapshot(file)
    for kind, listed in parse_snapshot(file).items():
        default = FILE_TYPES[kind].default_type
        expected = {name: listed.get(name, default) for name in shapes}
        if native.is_quantized(default):
            assert our_types(facts, shapes, kind) == expected, kind
