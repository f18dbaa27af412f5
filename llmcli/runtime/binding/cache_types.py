"""The types that K and V may have, and the modes of flash attention."""

from llmcli.errors import UserError

# enum ggml_type: the types of a KV cache (llama.cpp's -ctk/-ctv)
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
    """Raise UserError for cache types or a mode of flash attention that llama.cpp does not support,
    or does not support together.
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
