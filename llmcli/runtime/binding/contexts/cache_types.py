"""The data types that the K and V cache may have, and the modes of flash attention."""

from llmcli.errors import UserError
from llmcli.runtime.binding import contract

# the types that llama.cpp accepts for a KV cache (-ctk, -ctv), by their number in enum ggml_type
KV_TYPES = {
    name: contract.TENSOR_TYPES[name]
    for name in ("f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "bf16")
}
FLASH_MODES = {
    mode: contract.CONSTANTS[f"LLAMA_FLASH_ATTN_TYPE_{name}"]
    for mode, name in (("auto", "AUTO"), ("off", "DISABLED"), ("on", "ENABLED"))
}


def check_cache_types(type_k: str, type_v: str, flash_attn: str) -> None:
    """Raise UserError if llama.cpp does not support one of the cache types, the mode of flash
    attention, or their combination.
    """
    for flag, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind not in KV_TYPES:
            raise UserError(
                f"unknown KV cache type {kind!r}", hint=f"{flag} takes one of: {' '.join(KV_TYPES)}"
            )
    if flash_attn not in FLASH_MODES:
        raise UserError(
            f"unknown flash-attention mode {flash_attn!r}", hint="-fa takes auto, on or off"
        )
    if flash_attn == "off" and type_v not in ("f32", "f16", "bf16"):
        raise UserError(
            "a quantized V cache needs flash attention", hint="leave out -fa off, or use -ctv f16"
        )
