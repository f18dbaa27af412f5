"""scripts/reference/llama_cpp_versions.py: what it reads from the installed binding is what ctypes
says, and each kind of change in the texts of a version is reported.
"""

import ctypes
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.library import lib
from quant.native import ggml, ggml_contract
from scripts.reference import llama_cpp_versions
from scripts.reference.llama_cpp_versions import Version, compare, print_report, read_version

BINDING = Path(lib().__file__).read_text()
# the headers of ggml, cut down to what the tables name
GGML_HEADER = """
enum ggml_type { TYPES };
enum ggml_log_level { GGML_LOG_LEVEL_NONE = 0, DEBUG, INFO, WARN, GGML_LOG_LEVEL_ERROR, };
struct ggml_tensor {
    enum ggml_type type; // a comment; with a semicolon
    struct ggml_backend_buffer * buffer;
    int64_t ne[GGML_MAX_DIMS]; size_t nb[GGML_MAX_DIMS]; enum ggml_op op;
    int32_t op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)]; int32_t flags;
    struct ggml_tensor * src[GGML_MAX_SRC]; struct ggml_tensor * view_src; size_t view_offs;
    void * data; char name[GGML_MAX_NAME]; void * extra; char padding[8];
};
struct ggml_init_params {
    size_t mem_size; void * mem_buffer; bool no_alloc;
};
struct ggml_type_traits {
    const char * type_name; int64_t blck_size; int64_t blck_size_interleave; size_t type_size;
    bool is_quantized; ggml_to_float_t to_float; ggml_from_float_t from_float_ref;
};
""".replace(
    "TYPES", ", ".join(f"GGML_TYPE_{name} = {number}" for number, name in ggml.TYPE_NAMES.items())
)
BACKEND_HEADER = """
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_GPU,
    GGML_BACKEND_DEVICE_TYPE_IGPU, GGML_BACKEND_DEVICE_TYPE_ACCEL, GGML_BACKEND_DEVICE_TYPE_META };
""" + "\n".join(
    f"GGML_API int {name}(void);" for name in (*contract.GGML_FUNCTIONS, *ggml_contract.FUNCTIONS)
)
LLAMA_HEADER = """
enum llama_split_mode { LLAMA_SPLIT_MODE_NONE = 0, LLAMA_SPLIT_MODE_LAYER = 1, };
struct llama_model_tensor_buft_override {
    const char * pattern; ggml_backend_buffer_type_t buft;
};
"""
RPC_SOURCE = """
enum rpc_cmd { A = 0, B, C, D, E, F, G, H, I, J, K, RPC_CMD_GET_DEVICE_MEMORY, L, M,
    RPC_CMD_HELLO, RPC_CMD_DEVICE_COUNT };
if (std::strcmp(name, "ggml_backend_rpc_add_server") == 0) {}
if (std::strcmp(name, "ggml_backend_rpc_start_server") == 0) {}
static bool negotiate_hello(int socket) { return true; }
"""
CACHE_SOURCE = """
void llama_kv_cache::state_write(int io);
void llama_kv_cache::state_write(int io) { if (io) { write(1); } }
"""
TEXTS = {
    llama_cpp_versions.BINDING: BINDING,
    "ggml/include/ggml.h": GGML_HEADER,
    "ggml/include/ggml-backend.h": BACKEND_HEADER,
    "ggml/include/ggml-rpc.h": "#define GGML_RPC_MAX_SERVERS       16\n",
    "src/llama-cparams.h": "#define LLAMA_MAX_SEQ 256\n",
    "ggml/src/ggml-rpc/ggml-rpc.cpp": RPC_SOURCE,
    "src/llama-kv-cache.cpp": CACHE_SOURCE,
    "src/llama-context.cpp": "llama_context_params llama_context_default_params() { return { "
    + " ".join(
        f"/*.{name} =*/ {value},"
        for name, value in contract.DEFAULTS["llama_context_default_params"].items()
    )
    + " }; }",
    "src/llama-model.cpp": "llama_model_params llama_model_default_params() { return { "
    "/*.n_gpu_layers =*/ -1, /*.split_mode =*/ LLAMA_SPLIT_MODE_LAYER, /*.load_mode =*/ -1, "
    "/*.main_gpu =*/ 0, /*.use_extra_bufts =*/ true, }; }",
    "include/llama.h": LLAMA_HEADER,
    "src/llama-ext.h": ";\n".join(llama_cpp_versions.DECLARATIONS.values())
    + '; "ggml_backend_dev_get_extra_bufts"',
}
SAME = Version("same", TEXTS)


def changed(name: str, old: str, new: str) -> Version:
    """Return a version in which one text is changed."""
    assert old in TEXTS[name], old
    return Version("changed", TEXTS | {name: TEXTS[name].replace(old, new)})


def test_the_parsed_binding_is_that_of_ctypes() -> None:
    parsed = llama_cpp_versions.parse_binding(BINDING)
    for name in contract.STRUCTURES:
        theirs, ours = getattr(lib(), name), parsed[name]
        assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
        assert contract._layout(ours) == contract._layout(theirs)
    for name in contract.FUNCTIONS:
        assert len(parsed[name].argtypes) == len(getattr(lib(), name).argtypes or ())
    assert {name: parsed[name] for name in contract.CONSTANTS} == contract.CONSTANTS


def test_an_equal_version_has_nothing_to_report() -> None:
    report = compare(SAME, SAME)
    assert (report.refused, report.lost, report.to_read) == ([], [], [])


@pytest.mark.parametrize(
    ("name", "old", "new", "refused"),
    [
        (
            llama_cpp_versions.BINDING,
            '("kv_unified", ctypes.c_bool)',
            '("kv_shared", ctypes.c_bool)',
            "llama_context_params has no field kv_unified",
        ),
        (
            llama_cpp_versions.BINDING,
            "def llama_n_ubatch(",
            "def llama_n_rows(",
            "there is no function llama_n_ubatch",
        ),
        (
            llama_cpp_versions.BINDING,
            "LLAMA_POOLING_TYPE_RANK = 4",
            "LLAMA_POOLING_TYPE_RANK = 5",
            "LLAMA_POOLING_TYPE_RANK is 5 instead of 4",
        ),
        (
            "ggml/include/ggml-backend.h",
            "ggml_backend_dev_memory(",
            "ggml_backend_dev_bytes(",
            "libggml has no function ggml_backend_dev_memory",
        ),
        (
            "ggml/include/ggml-backend.h",
            "ggml_quantize_chunk(",
            "ggml_quantize_rows(",
            "libggml-base has no function ggml_quantize_chunk",
        ),
        (
            "ggml/include/ggml.h",
            "GGML_TYPE_BF16 = 30",
            "GGML_TYPE_BF16 = 31",
            "GGML_TYPE_BF16 is 31 instead of 30",
        ),
        (
            "ggml/include/ggml.h",
            "DEBUG, ",
            "",
            "GGML_LOG_LEVEL_ERROR is 3 instead of 4",
        ),
        (
            "ggml/include/ggml.h",
            "void * mem_buffer; ",
            "",
            "struct ggml_init_params has the fields mem_size, no_alloc",
        ),
        (
            "src/llama-cparams.h",
            "256",
            "64",
            "LLAMA_MAX_SEQ is 64 instead of 256",
        ),
        (
            "src/llama-model.cpp",
            "/*.use_extra_bufts =*/ true",
            "/*.use_extra_bufts =*/ false",
            "llama_model_default_params returns use_extra_bufts = false instead of 1",
        ),
        (
            "include/llama.h",
            "const char * pattern;",
            "const char * name;",
            "struct llama_model_tensor_buft_override has the fields name, buft",
        ),
        (
            "src/llama-model.cpp",
            "LLAMA_SPLIT_MODE_LAYER",
            "LLAMA_SPLIT_MODE_NONE",
            "llama_model_default_params returns split_mode = LLAMA_SPLIT_MODE_NONE instead of 1",
        ),
        (
            "ggml/src/ggml-rpc/ggml-rpc.cpp",
            "RPC_CMD_HELLO, ",
            "",
            "RPC_CMD_HELLO is not there instead of 14",
        ),
    ],
)
def test_each_kind_of_change_is_reported(name: str, old: str, new: str, refused: str) -> None:
    assert refused in compare(changed(name, old, new), SAME).refused


def test_lost_functions_and_texts_to_read_are_reported() -> None:
    declaration = llama_cpp_versions.DECLARATIONS[contract.MEMORY_BREAKDOWN]
    other = declaration.replace("const struct", "struct")
    report = compare(changed("src/llama-ext.h", declaration, other), SAME)
    assert report.lost == [f"{contract.MEMORY_BREAKDOWN.name}: {contract.MEMORY_BREAKDOWN.lost}"]
    report = compare(changed("src/llama-kv-cache.cpp", "write(1)", "write(2)"), SAME)
    assert report.to_read == ["src/llama-kv-cache.cpp: void llama_kv_cache::state_write differs"]
    lines: list[str] = []
    print_report("0.0", report, lines.append)
    assert lines[:2] == ["llama-cpp-python 0.0", "  refused: nothing"]


def test_archives_are_read_without_pip(tmp_path: Path) -> None:
    archive = tmp_path / "llama_cpp_python-9.9.9.tar.gz"
    with tarfile.open(archive, "w:gz") as source:
        for name, text in TEXTS.items():
            prefix = "" if name == llama_cpp_versions.BINDING else llama_cpp_versions.VENDORED
            member = tarfile.TarInfo(f"llama_cpp_python-9.9.9/{prefix}{name}")
            member.size = len(text.encode())
            source.addfile(member, io.BytesIO(text.encode()))
    assert read_version("9.9.9", tmp_path) == Version("9.9.9", TEXTS)
    wheel = tmp_path / "llama_cpp_python-9.9.8-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(llama_cpp_versions.BINDING, BINDING)
    version = read_version(str(wheel), tmp_path)
    assert (version.name, version.has_headers) == ("9.9.8", False)
    assert compare(version, SAME).refused == []
