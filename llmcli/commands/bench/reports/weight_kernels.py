"""How fast each type of weights is read and multiplied with one token: the table of `bench roofline`
and `doctor`, and its JSON.
"""

from collections.abc import Iterable
from typing import Any

from llmcli.bench.cost.weight_kernels import WeightKernel
from llmcli.ui import UI
from llmcli.units import format_size

MODEL_WEIGHTS = 10**9  # of the model whose speed is estimated if none is measured


def build_kernel_rows(kernels: Iterable[WeightKernel]) -> list[dict[str, Any]]:
    """Return a JSON object for each type."""
    return [
        {
            "type": kernel.type,
            "bits_per_weight": kernel.bits,
            "model_bytes": kernel.model_bytes,
            "kernel": "llmcli" if kernel.is_own else "ggml",
            "bytes_per_second": kernel.rate,
            "bytes_per_second_llmcli": kernel.own_rate,
            "bytes_per_second_ggml": kernel.ggml_rate,
            "bytes_per_second_one_thread": kernel.single_rate,
        }
        for kernel in kernels
    ]


def print_kernels(kernels: tuple[WeightKernel, ...], bandwidth: float | None, ui: UI) -> None:
    """Print a line for each type. `bandwidth`: of the memory in bytes per second, None if unknown.
    The last column is the speed of the measured model, or of one with MODEL_WEIGHTS weights, if all
    its weights had the type.
    """
    has_model = any(kernel.model_bytes for kernel in kernels)
    weights = sum(int(8 * kernel.model_bytes / kernel.bits) for kernel in kernels)
    rows = [
        (
            kernel.type,
            f"{kernel.bits:.2f}",
            *((format_size(kernel.model_bytes) if kernel.model_bytes else "-",) * has_model),
            "llmcli" if kernel.is_own else "ggml",
            f"{kernel.rate / 1e9:.1f}",
            "?" if bandwidth is None else f"{kernel.rate / bandwidth:.0%}",
            f"{kernel.single_rate / 1e9:.1f}",
            f"{kernel.ggml_rate / 1e9:.1f}",
            f"{kernel.tokens_per_second(weights or MODEL_WEIGHTS):.0f}",
        )
        for kernel in kernels
    ]
    numbers = ("GB/s", "share", "one thread", "ggml", "tok/s if all" if weights else "tok/s of 1B")
    in_model = ("in the model",) * has_model
    ui.text()
    ui.table(
        ("weights", "bits", *in_model, "kernel", *numbers),
        rows,
        right=("bits", *in_model, *numbers),
    )
