"""What llmcli relies on in llama.cpp and its ctypes binding: fields of structures, functions,
numbers of enums, default values, and layouts in memory.

`check` compares a loaded library with this table once; a version that differs is refused with one
message instead of a crash or a silent change later. quant has its own table for libggml-base
(quant/native/ggml_contract.py). docs/upgrading-llama.cpp.md says how to move to another version.

Structures are set through `set_fields`, because ctypes structures silently accept unknown
attributes: a parameter that llama.cpp has renamed would have no effect.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcli.runtime.binding import ggml_tensor
from quant.native.ggml_contract import PACKAGE_VERSION as PACKAGE_VERSION
from quant.native.ggml_contract import installed_version as installed_version
from quant.native.ggml_contract import version_error as version_error

# offset and size in bytes of each field that llmcli sets or reads, and the size of the structure
Fields = Mapping[str, tuple[int, int]]
STRUCTURES: Mapping[str, tuple[int, Fields]] = {
    "llama_model_params": (
        80,
        {
            "devices": (0, 8),
            "tensor_buft_overrides": (8, 8),
            "n_gpu_layers": (16, 4),
            "split_mode": (20, 4),
            "load_mode": (24, 4),
            "main_gpu": (32, 4),
            "tensor_split": (40, 8),
            "progress_callback": (48, 8),
            "vocab_only": (72, 1),
            "use_extra_bufts": (74, 1),
            "no_alloc": (76, 1),
            "load_mtp": (77, 1),
        },
    ),
    "llama_context_params": (
        160,
        {
            "n_ctx": (0, 4),
            "n_batch": (4, 4),
            "n_ubatch": (8, 4),
            "n_seq_max": (12, 4),
            "n_rs_seq": (16, 4),
            "n_outputs_max": (20, 4),
            "n_threads": (28, 4),
            "n_threads_batch": (32, 4),
            "ctx_type": (36, 4),
            "pooling_type": (44, 4),
            "flash_attn_type": (52, 4),
            "cb_eval": (88, 8),
            "type_k": (104, 4),
            "type_v": (108, 4),
            "abort_callback": (112, 8),
            "abort_callback_data": (120, 8),
            "embeddings": (128, 1),
            "offload_kqv": (129, 1),
            "no_perf": (130, 1),
            "op_offload": (131, 1),
            "swa_full": (132, 1),
            "kv_unified": (133, 1),
            "ctx_other": (152, 8),
        },
    ),
    "llama_model_quantize_params": (
        64,
        {
            "nthread": (0, 4),
            "ftype": (4, 4),
            "allow_requantize": (16, 1),
            "imatrix": (24, 8),
        },
    ),
    "llama_model_imatrix_data": (24, {"name": (0, 8), "data": (8, 8), "size": (16, 8)}),
    "llama_batch": (
        56,
        {
            "n_tokens": (0, 4),
            "token": (8, 8),
            "embd": (16, 8),
            "pos": (24, 8),
            "n_seq_id": (32, 8),
            "seq_id": (40, 8),
            "logits": (48, 8),
        },
    ),
    "llama_token_data": (12, {"id": (0, 4), "logit": (4, 4), "p": (8, 4)}),
    "llama_token_data_array": (
        32,
        {"data": (0, 8), "size": (8, 8), "selected": (16, 8), "sorted": (24, 1)},
    ),
    "llama_logit_bias": (8, {"token": (0, 4), "bias": (4, 4)}),
}
# Default values that a library with the layout of STRUCTURES returns. They differ if the binding
# describes another library than the one that was loaded (LLAMA_CPP_LIB_PATH).
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama_model_default_params": {
        "n_gpu_layers": -1,
        "split_mode": 1,
        "load_mode": -1,
        "main_gpu": 0,
        "use_extra_bufts": 1,
    },
    "llama_context_default_params": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_seq_max": 1,
        "flash_attn_type": -1,
        "type_k": 1,
        "type_v": 1,
        "offload_kqv": 1,
        "op_offload": 1,
        "swa_full": 1,
        "kv_unified": 0,
    },
}
# functions of the binding, with the number of their arguments
FUNCTIONS: Mapping[str, int] = {
    "llama_backend_init": 0,
    "llama_batch_get_one": 2,
    "llama_context_default_params": 0,
    "llama_decode": 2,
    "llama_encode": 2,
    "llama_free": 1,
    "llama_get_causal_attn": 1,
    "llama_get_embeddings_ith": 2,
    "llama_get_embeddings_seq": 2,
    "llama_get_logits_ith": 2,
    "llama_get_memory": 1,
    "llama_init_from_model": 2,
    "llama_log_set": 2,
    "llama_max_parallel_sequences": 0,
    "llama_memory_can_shift": 1,
    "llama_memory_clear": 2,
    "llama_memory_seq_add": 5,
    "llama_memory_seq_cp": 5,
    "llama_memory_seq_pos_max": 2,
    "llama_memory_seq_pos_min": 2,
    "llama_memory_seq_rm": 4,
    "llama_model_default_params": 0,
    "llama_model_desc": 3,
    "llama_model_free": 1,
    "llama_model_get_vocab": 1,
    "llama_model_has_decoder": 1,
    "llama_model_has_encoder": 1,
    "llama_model_is_diffusion": 1,
    "llama_model_is_hybrid": 1,
    "llama_model_is_recurrent": 1,
    "llama_model_load_from_file": 2,
    "llama_model_meta_val_str": 4,
    "llama_model_n_cls_out": 1,
    "llama_model_n_ctx_train": 1,
    "llama_model_n_embd": 1,
    "llama_model_n_embd_out": 1,
    "llama_model_n_params": 1,
    "llama_model_n_swa": 1,
    "llama_model_size": 1,
    "llama_n_batch": 1,
    "llama_n_ctx": 1,
    "llama_n_rs_seq": 1,
    "llama_n_threads_batch": 1,
    "llama_n_ubatch": 1,
    "llama_numa_init": 1,
    "llama_print_system_info": 0,
    "llama_sampler_accept": 2,
    "llama_sampler_apply": 2,
    "llama_sampler_chain_add": 2,
    "llama_sampler_chain_default_params": 0,
    "llama_sampler_chain_init": 1,
    "llama_sampler_clone": 1,
    "llama_sampler_free": 1,
    "llama_sampler_init_dist": 1,
    "llama_sampler_init_dry": 7,
    "llama_sampler_init_grammar": 3,
    "llama_sampler_init_logit_bias": 3,
    "llama_sampler_init_min_p": 2,
    "llama_sampler_init_mirostat_v2": 3,
    "llama_sampler_init_penalties": 5,
    "llama_sampler_init_temp": 1,
    "llama_sampler_init_temp_ext": 3,
    "llama_sampler_init_top_k": 1,
    "llama_sampler_init_top_n_sigma": 1,
    "llama_sampler_init_top_p": 2,
    "llama_sampler_init_typical": 2,
    "llama_sampler_init_xtc": 4,
    "llama_sampler_sample": 3,
    "llama_set_abort_callback": 3,
    "llama_set_embeddings": 2,
    "llama_set_n_threads": 3,
    "llama_state_seq_get_data": 4,
    "llama_state_seq_get_data_ext": 5,
    "llama_state_seq_get_size": 2,
    "llama_state_seq_get_size_ext": 3,
    "llama_state_seq_set_data": 4,
    "llama_state_seq_set_data_ext": 5,
    "llama_synchronize": 1,
    "llama_token_to_piece": 6,
    "llama_tokenize": 7,
    "llama_vocab_bos": 1,
    "llama_vocab_eos": 1,
    "llama_vocab_fim_mid": 1,
    "llama_vocab_fim_pre": 1,
    "llama_vocab_fim_rep": 1,
    "llama_vocab_fim_sep": 1,
    "llama_vocab_fim_suf": 1,
    "llama_vocab_get_add_bos": 1,
    "llama_vocab_get_add_eos": 1,
    "llama_vocab_get_add_sep": 1,
    "llama_vocab_get_attr": 2,
    "llama_vocab_get_text": 2,
    "llama_vocab_is_control": 2,
    "llama_vocab_is_eog": 2,
    "llama_vocab_n_tokens": 1,
    "llama_vocab_sep": 1,
    "llama_vocab_type": 1,
}
# types of callbacks in the binding
CALLBACK_TYPES = (
    "ggml_abort_callback",
    "ggml_backend_sched_eval_callback",
    "llama_log_callback",
    "llama_progress_callback",
)
# functions of libggml that the binding does not describe
GGML_FUNCTIONS = (
    "ggml_add",
    "ggml_backend_buffer_free",
    "ggml_backend_buffer_get_base",
    "ggml_backend_buffer_get_type",
    "ggml_backend_buffer_is_host",
    "ggml_backend_buft_alloc_buffer",
    "ggml_backend_buft_get_device",
    "ggml_backend_buft_is_host",
    "ggml_backend_buft_name",
    "ggml_backend_cpu_buffer_from_ptr",
    "ggml_backend_cpu_buffer_type",
    "ggml_backend_dev_backend_reg",
    "ggml_backend_dev_buffer_type",
    "ggml_backend_dev_by_name",
    "ggml_backend_dev_by_type",
    "ggml_backend_dev_count",
    "ggml_backend_dev_description",
    "ggml_backend_dev_get",
    "ggml_backend_dev_init",
    "ggml_backend_dev_memory",
    "ggml_backend_dev_name",
    "ggml_backend_dev_type",
    "ggml_backend_free",
    "ggml_backend_graph_compute",
    "ggml_backend_reg_by_name",
    "ggml_backend_reg_get_proc_address",
    "ggml_backend_reg_name",
    "ggml_backend_register",
    "ggml_backend_tensor_alloc",
    "ggml_backend_tensor_get",
    "ggml_backend_tensor_set",
    "ggml_backend_unload",
    "ggml_build_forward_expand",
    "ggml_concat",
    "ggml_free",
    "ggml_init",
    "ggml_is_contiguous",
    "ggml_mul_mat",
    "ggml_nbytes",
    "ggml_new_graph",
    "ggml_new_tensor_2d",
    "ggml_op_name",
    "ggml_relu",
    "ggml_set_abort_callback",
    "ggml_set_name",
    "ggml_silu",
    "ggml_tensor_overhead",
    "ggml_type_name",
)
# Constants of the binding, which are numbers of enums and versions of formats
CONSTANTS: Mapping[str, int] = {
    "GGML_NUMA_STRATEGY_DISTRIBUTE": 1,
    "GGML_NUMA_STRATEGY_ISOLATE": 2,
    "GGML_NUMA_STRATEGY_NUMACTL": 3,
    "LLAMA_CONTEXT_TYPE_MTP": 1,
    "LLAMA_DEFAULT_SEED": 0xFFFFFFFF,
    "LLAMA_FLASH_ATTN_TYPE_AUTO": -1,
    "LLAMA_FLASH_ATTN_TYPE_DISABLED": 0,
    "LLAMA_FLASH_ATTN_TYPE_ENABLED": 1,
    "LLAMA_LOAD_MODE_AUTO": -1,
    "LLAMA_LOAD_MODE_NONE": 0,
    "LLAMA_LOAD_MODE_MMAP": 1,
    "LLAMA_LOAD_MODE_MLOCK": 2,
    "LLAMA_LOAD_MODE_MMAP_MLOCK": 3,
    "LLAMA_POOLING_TYPE_NONE": 0,
    "LLAMA_POOLING_TYPE_MEAN": 1,
    "LLAMA_POOLING_TYPE_CLS": 2,
    "LLAMA_POOLING_TYPE_LAST": 3,
    "LLAMA_POOLING_TYPE_RANK": 4,
    "LLAMA_SPLIT_MODE_NONE": 0,
    "LLAMA_SPLIT_MODE_LAYER": 1,
    "LLAMA_SPLIT_MODE_ROW": 2,
    "LLAMA_SPLIT_MODE_TENSOR": 3,
    "LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY": 1,
    "LLAMA_STATE_SEQ_VERSION": 3,  # format of the states that kv_state/ reads and kv_state_file.py saves
    "LLAMA_TOKEN_ATTR_UNKNOWN": 1 << 0,
    "LLAMA_TOKEN_ATTR_CONTROL": 1 << 3,
    "LLAMA_TOKEN_ATTR_USER_DEFINED": 1 << 4,
    "LLAMA_TOKEN_ATTR_LSTRIP": 1 << 7,
    "LLAMA_TOKEN_ATTR_RSTRIP": 1 << 8,
    "LLAMA_VOCAB_TYPE_SPM": 1,
    "LLAMA_VOCAB_TYPE_BPE": 2,
}
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ, which llama_max_parallel_sequences returns
# enum ggml_type: the types that llama.cpp accepts for a KV cache, and those of tensors that are read
TENSOR_TYPES: Mapping[str, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "i32": 26,
    "bf16": 30,
}
# Numbers that only the source text has. scripts/reference/llama_cpp_versions.py compares them with
# the headers of a version.
HEADER_NUMBERS: Mapping[str, int] = {
    "GGML_LOG_LEVEL_ERROR": 4,
    "GGML_BACKEND_DEVICE_TYPE_CPU": 0,
    "GGML_BACKEND_DEVICE_TYPE_GPU": 1,
    "GGML_BACKEND_DEVICE_TYPE_IGPU": 2,
    "GGML_BACKEND_DEVICE_TYPE_ACCEL": 3,
    "GGML_BACKEND_DEVICE_TYPE_META": 4,
    "GGML_RPC_MAX_SERVERS": 16,
    "RPC_CMD_GET_DEVICE_MEMORY": 11,
    "RPC_CMD_HELLO": 14,
    "RPC_CMD_DEVICE_COUNT": 15,
}


class TensorBufferOverride(ctypes.Structure):
    """The Python mirror of `struct llama_model_tensor_buft_override` (llama.h), which the binding
    does not have.
    """

    __slots__ = ()
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class OptionalSymbol:
    """A function that a build of llama.cpp may lack: an internal one, or one of a backend. `library`:
    the library that has it. `lost`: what llmcli does without it.
    """

    name: str
    library: str
    lost: str


MEMORY_BREAKDOWN = OptionalSymbol(
    "_Z26llama_get_memory_breakdownPK13llama_context",
    "llama",
    "plan and --fit estimate the bytes of buffers instead of asking llama.cpp",
)
TENSOR_MAP = OptionalSymbol(
    "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model",
    "llama",
    "plan does not tell how many bytes of the weights are on each device",
)
SOFT_MAX = OptionalSymbol(
    "ggml_vec_soft_max_f32",
    "ggml-cpu",
    "log-probabilities are computed by numpy where llmcli's own C code is missing, which is slower",
)
RPC_ADD_SERVER = OptionalSymbol(
    "ggml_backend_rpc_add_server", "ggml-rpc", "--rpc is refused: no workers can be used"
)
RPC_START_SERVER = OptionalSymbol(
    "ggml_backend_rpc_start_server", "ggml-rpc", "llmcli worker --rpc is refused"
)
EXTRA_BUFFER_TYPES = OptionalSymbol(
    "ggml_backend_dev_get_extra_bufts",
    "ggml-cpu",
    "--reproducible does not repack weights for AMX",
)
GGML_VERSION = OptionalSymbol(
    "ggml_version",
    "ggml-base",
    "llmcli's own matrix products are not used: they need a certain version of ggml",
)
_PRODUCTS_LOST = "llmcli's own products are not used: tokens and prompts take longer"
REPACK_BUFFER_TYPE = OptionalSymbol(
    "_Z35ggml_backend_cpu_repack_buffer_typev", "ggml-cpu", _PRODUCTS_LOST
)
BARRIER = OptionalSymbol("ggml_barrier", "ggml-cpu", _PRODUCTS_LOST)
CHUNK_SET = OptionalSymbol("ggml_threadpool_chunk_set", "ggml-cpu", _PRODUCTS_LOST)
CHUNK_ADD = OptionalSymbol("ggml_threadpool_chunk_add", "ggml-cpu", _PRODUCTS_LOST)
SET_LAYER_INPUT = OptionalSymbol(
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", "llama", "--draft eagle3 is refused"
)
GET_LAYER_INPUT = OptionalSymbol(
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj", "llama", "--draft eagle3 is refused"
)
OPTIONAL_SYMBOLS = (
    MEMORY_BREAKDOWN,
    TENSOR_MAP,
    SOFT_MAX,
    RPC_ADD_SERVER,
    RPC_START_SERVER,
    EXTRA_BUFFER_TYPES,
    GGML_VERSION,
    REPACK_BUFFER_TYPE,
    BARRIER,
    CHUNK_SET,
    CHUNK_ADD,
    SET_LAYER_INPUT,
    GET_LAYER_INPUT,
)


def check(module: Any) -> None:
    """Raise UserError for the first difference between a loaded llama.cpp and this table. `module`:
    the module llama_cpp.llama_cpp.
    """
    found = next(differences(module), None)
    if found is not None:
        raise version_error(found)


def differences(module: Any) -> Iterator[str]:
    """Yield each difference between the module llama_cpp.llama_cpp and this table, in words.

    The order matters: a function is called only when it is known to exist, with structures that
    have the right layout.
    """
    has_layout = True
    for found in interface_differences(module):
        has_layout = False
        yield found
    if not has_layout:
        return
    for function, values in DEFAULTS.items():
        defaults = getattr(module, function)()
        for field, value in values.items():
            if getattr(defaults, field) != value:
                yield f"{function} returns {field} = {getattr(defaults, field)} instead of {value}"
    sequences = module.llama_max_parallel_sequences()
    if sequences != MAX_SEQUENCES:
        yield f"llama.cpp has up to {sequences} sequences instead of {MAX_SEQUENCES}"
    library = module._lib
    library.ggml_type_name.restype, library.ggml_type_name.argtypes = (
        ctypes.c_char_p,
        [ctypes.c_int],
    )
    for name, number in TENSOR_TYPES.items():
        other = (library.ggml_type_name(number) or b"none").decode("utf-8", "replace")
        if other != name:
            yield f"tensor type {number} is {other} instead of {name}"
    difference = ggml_tensor.layout_difference(library)
    if difference:
        yield difference


def interface_differences(module: Any) -> Iterator[str]:
    """Yield what is missing or has another layout in the module. Nothing is called."""
    for name, (size, fields) in STRUCTURES.items():
        structure = getattr(module, name, None)
        if structure is None:
            yield f"there is no {name}"
            continue
        yield from structure_differences(name, fields, _layout(structure))
        if ctypes.sizeof(structure) != size:
            yield f"{name} has {ctypes.sizeof(structure)} bytes instead of {size}"
    for name, count in FUNCTIONS.items():
        function = getattr(module, name, None)
        if function is None:
            yield f"there is no function {name}"
        elif len(getattr(function, "argtypes", None) or ()) != count:
            yield f"{name} has {len(function.argtypes or ())} arguments instead of {count}"
    for name in CALLBACK_TYPES:
        if not hasattr(module, name):
            yield f"there is no type {name}"
    for name, value in CONSTANTS.items():
        other = getattr(module, name, None)
        if other != value:
            yield (
                f"{name} is {other} instead of {value}"
                if other is not None
                else f"there is no {name}"
            )
    library = getattr(module, "_lib", None)
    if library is None:
        yield "the binding does not say which library it has loaded"
        return
    for name in GGML_FUNCTIONS:
        if not hasattr(library, name):
            yield f"libggml has no function {name}"


def structure_differences(name: str, fields: Fields, found: Fields) -> Iterator[str]:
    """Yield each field of the structure `name` that is missing in `found`, or has another place or
    size there.
    """
    for field, (offset, size) in fields.items():
        if field not in found:
            yield f"{name} has no field {field}"
        elif found[field] != (offset, size):
            other_offset, other_size = found[field]
            yield (
                f"{name}.{field} has {other_size} bytes at {other_offset} "
                f"instead of {size} at {offset}"
            )


def _layout(structure: Any) -> Fields:
    """Return the offset and size of each field of a ctypes structure."""
    return {
        name: (getattr(structure, name).offset, getattr(structure, name).size)
        for name, *_ in getattr(structure, "_fields_", ())
    }


def optional_function(library: Any, symbol: OptionalSymbol) -> Any | None:
    """Return an optional function of a ctypes library, or None if the library lacks it."""
    assert symbol in OPTIONAL_SYMBOLS, symbol
    return getattr(library, symbol.name, None)


def set_fields(structure: ctypes.Structure, **values: Any) -> None:
    """Set fields of a structure of llama.cpp. Raises AttributeError for a field that the structure
    does not have, or that STRUCTURES does not list.
    """
    for field, value in values.items():
        _require_field(structure, field)
        setattr(structure, field, value)


def field_setter(structure: ctypes.Structure, field: str) -> Callable[[Any], None]:
    """Return a function that sets one field of a structure of llama.cpp, for code that runs in
    every pass. Raises AttributeError like `set_fields`.
    """
    _require_field(structure, field)
    return partial(getattr(type(structure), field).__set__, structure)


def _require_field(structure: ctypes.Structure, field: str) -> None:
    """Raise AttributeError if a structure has no field of this name, or STRUCTURES does not list
    it.
    """
    name = type(structure).__name__
    if field not in STRUCTURES[name][1]:
        raise AttributeError(f"contract.py does not list the field {field} of {name}")
    if not any(field == known for known, *_ in structure._fields_):
        raise AttributeError(f"{name} has no field {field}")
