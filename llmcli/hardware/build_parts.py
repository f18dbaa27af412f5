"""The parts of llmcli and llama.cpp that this installation may lack, and what is lost without each:
our own C code, RPC, and the kernels for AMX.

Nothing fails without our C code: numpy and ggml do the same work more slowly.
"""

from dataclasses import dataclass

from llmcli.runtime.binding.kernels import gemm, products, row_draws, row_scan
from llmcli.runtime.binding.placement import amx, devices, rpc
from quant import installation
from quant.native import ggml, kernels

OTHER_VERSION = "the installed library is that of another version of llmcli"


@dataclass(frozen=True, slots=True)
class BuildPart:
    """A part of the installation.

    - `problem`: why it is not active; "" if it is.
    - `without_it`: who does the work then, and what is lost.
    - `remedy`: what the user can do about it, a command or words; "" for nothing.
    """

    name: str
    problem: str
    without_it: str
    remedy: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the part is used on this machine."""
        return not self.problem


def list_parts() -> tuple[BuildPart, ...]:
    """Return the parts of this installation. Raises UserError if llama.cpp does not load."""
    opened = kernels.open_kernels()
    missing = opened.problem if opened.library is None else ""
    advice = installation.install_kernels_advice() if opened.problem else ""
    other_rounding = "this ggml rounds in another way, and the bytes must be its own"
    parts = [
        BuildPart(
            "scans of logits",
            missing or ("" if row_scan.load_row_scan() else OTHER_VERSION),
            "ggml and numpy: a token takes some tens of microseconds longer",
            advice if row_scan.load_row_scan() else installation.install_kernels_advice(),
        ),
        BuildPart(
            "draws from many rows",
            missing or ("" if row_draws.load_row_draws() else OTHER_VERSION),
            "llama.cpp's samplers, one answer after the other: many answers at once, and penalties, "
            "take longer",
            advice if row_draws.load_row_draws() else installation.install_kernels_advice(),
        ),
        _gemm_part(),
        _products_part(),
        BuildPart(
            "encoders of Q4_K, Q5_K, Q6_K",
            missing or ("" if ggml.has_encoders() else other_rounding),
            "ggml: the same bytes, 3 to 9 times slower",
            advice,
        ),
        BuildPart(
            "search of scales",
            missing or ("" if ggml.native_search() else OTHER_VERSION),
            "numpy: --method search is about ten times slower, gptq is slower, and the bytes differ",
            advice,
        ),
        BuildPart(
            "RPC",
            "" if rpc.is_built() else "llama.cpp was built without it",
            "--rpc and `llmcli worker` are refused",
            "" if rpc.is_built() else installation.install_llama_command("-DGGML_RPC=on"),
        ),
    ]
    if devices.repacks_for_amx():
        is_faulty = amx.is_build_faulty()
        parts.append(
            BuildPart(
                "AMX",
                "the GCC that compiled llama.cpp writes wrong code for it" if is_faulty else "",
                "models are loaded without repacked weights: prompts take longer",
                f"use GCC 14 or newer, or: {amx.repair_command()}" if is_faulty else "",
            )
        )
    return tuple(parts)


def _gemm_part() -> BuildPart:
    """Return the part of the matrix products. Only a CPU that could use them has a remedy."""
    was_built = kernels.open_gemm().library is not None
    return BuildPart(
        "products in bfloat16",
        gemm.unusable_reason(),
        "ggml: prompts of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 take longer",
        "" if was_built or not kernels.supports_gemm() else installation.install_kernels_advice(),
    )


def _products_part() -> BuildPart:
    """Return the part of the products inside of ggml's CPU backend. Only a CPU that could use them
    has a remedy.
    """
    was_built = kernels.open_products().library is not None
    return BuildPart(
        "products of interleaved rows",
        products.unusable_reason(),
        "ggml: tokens and prompts of quantized models take longer",
        ""
        if was_built or not kernels.supports_products()
        else installation.install_kernels_advice(),
    )


def library_name() -> str:
    """Return the name of the library of our C code, which says for which CPUs it is; "" without
    one.
    """
    opened = kernels.open_kernels()
    return "" if opened.library is None else opened.name


def list_warnings(parts: tuple[BuildPart, ...]) -> list[tuple[str, str]]:
    """Return the problems that cost speed and that the user can solve, each as a message and what
    to do. RPC is no loss of speed.
    """
    warnings = [
        (f"{part.name}: off, because {part.problem}; {part.without_it}", part.remedy)
        for part in parts
        if part.problem and part.remedy and part.name != "RPC"
    ]
    # one message if all are missing for the same reason
    opened = kernels.open_kernels()
    if opened.problem:
        own = f"llmcli's own C code is not used as it could be: {opened.problem}"
        others = [warning for warning in warnings if opened.problem not in warning[0]]
        return [(own, installation.install_kernels_advice()), *others]
    return warnings
