"""The data types that the K and V cache may have, and the modes of flash attention."""

from llmcli.errors import UserError

# the types that llama.cpp accepts for a KV cache (-ctk, -ctv), by their number in enum ggml_type
KV_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
FLASH_MODES = {"auto": -1, "off": 0, "on": 1}


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
