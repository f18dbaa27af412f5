"""What quant relies on in libggml-base: its functions, and the numbers and block sizes of tensor
types. It is checked once when the library is opened, because other versions may differ.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

from quant.errors import UserError

PACKAGE, PACKAGE_VERSION = "llama-cpp-python", "0.3.36"  # the version that has all of this
FUNCTIONS = (
    "ggml_bf16_to_fp32_row",
    "ggml_fp16_to_fp32_row",
    "ggml_get_type_traits",
    "ggml_quantize_chunk",
    "ggml_quantize_requires_imatrix",
    "ggml_type_name",
    "ggml_validate_row_data",
)
# values and bytes of a block of each tensor type
BLOCK_SIZES: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 36),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "F64": (1, 8),
    "IQ1_M": (256, 56),
    "BF16": (1, 2),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
}


class TypeTraits(ctypes.Structure):
    """The beginning of `struct ggml_type_traits` (ggml.h), up to to_float."""

    __slots__ = ()  # so that other attributes are refused
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    ]


def check_library(library: Any, type_names: Mapping[int, str]) -> None:
    """Raise UserError if a ctypes library lacks a function, or if its tensor types have other
    numbers or block sizes. `type_names`: the names of the types by their number.
    """
    for name in FUNCTIONS:
        if not hasattr(library, name):
            raise version_error(f"libggml-base has no function {name}")
    library.ggml_type_name.argtypes = library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    for number, name in type_names.items():
        # the name comes first, because the table of traits ends at the library's last type
        found = (library.ggml_type_name(number) or b"none").decode("utf-8", "replace")
        if found.upper() != name:
            raise version_error(f"tensor type {number} is {found} instead of {name}")
        traits = library.ggml_get_type_traits(number)[0]
        values, nbytes = BLOCK_SIZES[name]
        if (traits.blck_size, traits.type_size) != (values, nbytes):
            raise version_error(
                f"a block of {name} has {traits.blck_size} values in {traits.type_size} bytes "
                f"instead of {values} in {nbytes}"
            )


def version_error(difference: str) -> UserError:
    """Return the error for an installed llama.cpp that is not the expected one. `difference`: the
    first difference that was found.
    """
    from quant import installation  # imported here because it takes time

    return UserError(
        f"llmcli needs {PACKAGE} {PACKAGE_VERSION}; this is {installed_version()} ({difference})",
        hint=f"{installation.install_llama_command()} installs the version that fits",
    )


def installed_version() -> str:
    """Return the version of the installed llama-cpp-python, "unknown" if it is not installed as a
    package.
    """
    # imported here because it takes time, and is needed for an error only
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"
