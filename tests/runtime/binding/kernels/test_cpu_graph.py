"""Computations of ggml on the CPU: the values of numpy, with weights that stay in their bytes."""

import subprocess
import sys

import numpy as np
import pytest

from llmcli.runtime.binding.kernels.cpu_graph import open_graph
from quant.native import ggml


def aligned(blocks: np.ndarray) -> np.ndarray:
    """Return a copy of bytes at an address that is a multiple of 32."""
    memory = np.zeros(blocks.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 32
    copy = memory[start : start + blocks.nbytes].reshape(blocks.shape)
    copy[:] = blocks
    return copy


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("F32", 1e-5), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2)]
)
def test_values_are_those_of_numpy(kind: str, tolerance: float, threads: int) -> None:
    random = np.random.default_rng(1)
    matrix, bias, inputs, other = (
        random.normal(0, 1, shape).astype(np.float32)
        for shape in ((96, 64), (1, 96), (3, 64), (2, 96))
    )
    blocks = aligned(ggml.encode(matrix, kind, label="w"))
    stored = ggml.decode(blocks, kind, 64, label="w")
    with open_graph(threads) as graph:
        weight = graph.weight(ggml.TYPE_NUMBERS[kind], 64, blocks)
        sums = graph.add(graph.multiply(weight, graph.values(inputs)), graph.values(bias))
        both = graph.stack(graph.silu(sums), graph.relu(graph.values(other)))
        found = graph.output(both)
        for scale in (1.0, 0.5):
            inputs *= scale
            graph.compute()
            expected = inputs @ stored.T + bias
            expected = np.concatenate([expected / (1 + np.exp(-expected)), np.maximum(other, 0)])
            assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


def test_llama_cpp_logs_nothing_to_the_terminal() -> None:
    program = (
        "from contextlib import ExitStack\n"
        "from llmcli.planning.measurements.product_trial import make_product\n"
        "with ExitStack() as stack:\n"
        "    make_product(stack, 'Q4_0', 32, 1, 1, own=False)(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
