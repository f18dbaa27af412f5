"""The computation of draft heads: the logits of all heads from one hidden state.

The heads share one product with the model's output matrix, so that its weights are read once for all
heads. They are read from the model's file, which the operating system keeps in memory once.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kernels.cpu_graph import CpuGraph, open_graph
from llmcli.runtime.drafting.draft_files.heads_file import BLOCKWISE, DraftHeads, output_matrix
from llmcli.runtime.drafting.top_tokens import top_tokens
from quant.gguf.header import TensorInfo
from quant.model_file.model_header import ModelHeader
from quant.native import ggml

Floats = NDArray[np.float32]


class HeadGraph:
    """The heads of a file for one model. Made by `open_heads`."""

    def __init__(
        self, heads: DraftHeads, model: ModelHeader, threads: int, stack: ExitStack
    ) -> None:
        self.shapes = heads.shapes
        self._threads, self._stack = threads, stack
        self._output = _map(output_matrix(model))
        self._bias = next((_map(t) for t in model.tensors if t.name == "output.bias"), None)
        self._weights = {name: _map(heads.tensors[name]) for name in heads.shapes.tensors()}
        self._state = np.zeros((1, heads.shapes.n_embd), np.float32)
        self._graphs: dict[int, tuple[CpuGraph, list[Floats]]] = {}

    def zero_state(self) -> Floats:
        """Return a hidden state of zeros, for measurements."""
        return np.zeros(self.shapes.n_embd, np.float32)

    def guess(self, state: Floats, count: int, n_ranks: int = 1) -> list[tuple[int, ...]]:
        """Return the `n_ranks` likeliest tokens of each of the first `count` heads, the likeliest
        first. The other arguments and errors are those of `logits`.
        """
        return [tuple(top_tokens(row, n_ranks)) for row in self.logits(state, count)]

    def logits(self, state: Floats, count: int) -> Floats:
        """Return the logits of the first `count` heads for a final hidden state `[n_embd]` of the
        model, `[count, n_vocab]`. Raises UserError if ggml fails.
        """
        if count not in self._graphs:
            self._graphs[count] = self._build(count)
        graph, outputs = self._graphs[count]
        self._state[0] = state
        graph.compute()
        return np.concatenate(outputs) if len(outputs) > 1 else outputs[0]

    def _build(self, count: int) -> tuple[CpuGraph, list[Floats]]:
        """Return the computation of the first `count` heads, and the arrays of its logits."""
        graph = self._stack.enter_context(open_graph(self._threads))
        state = graph.values(self._state)
        hidden = (
            graph.relu(self._layer(graph, "hidden", state))
            if self.shapes.method == BLOCKWISE
            else state
        )
        states = [self._head_state(graph, head, state, hidden) for head in range(count)]
        if self.shapes.has_outputs:
            products = [
                graph.multiply(self._weight(graph, f"head.{head}.output.weight"), values)
                for head, values in enumerate(states)
            ]
            return graph, [graph.output(product) for product in products]
        stacked = states[0]
        for values in states[1:]:
            stacked = graph.stack(stacked, values)
        info, blocks = self._output
        product = graph.multiply(_add_weight(graph, info, blocks), stacked)
        if self._bias:
            product = graph.add(product, _add_vector(graph, *self._bias))
        return graph, [graph.output(product)]

    def _head_state(self, graph: CpuGraph, head: int, state: int, hidden: int) -> int:
        """Return the hidden state of a head, with which the output matrix is multiplied."""
        if self.shapes.method == BLOCKWISE:
            return graph.add(state, self._layer(graph, f"head.{head}", hidden))
        for layer in range(self.shapes.n_layers):
            state = graph.add(state, graph.silu(self._layer(graph, f"head.{head}.{layer}", state)))
        return state

    def _layer(self, graph: CpuGraph, name: str, inputs: int) -> int:
        """Return W x + b of a layer."""
        product = graph.multiply(self._weight(graph, f"{name}.weight"), inputs)
        return graph.add(product, _add_vector(graph, *self._weights[f"{name}.bias"]))

    def _weight(self, graph: CpuGraph, name: str) -> int:
        return _add_weight(graph, *self._weights[name])


@contextmanager
def open_heads(heads: DraftHeads, model: ModelHeader, threads: int) -> Iterator[HeadGraph]:
    """Yield the heads for a model, which they must fit (heads_file.require_fitting_heads). They
    are computed by `threads` threads of the CPU.
    """
    with ExitStack() as stack:
        yield HeadGraph(heads, model, threads, stack)


def _map(tensor: TensorInfo) -> tuple[TensorInfo, NDArray[np.uint8]]:
    """Return a tensor with its bytes, `[rows, row_bytes]`, which stay in the file."""
    data = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes,))
    return tensor, data.reshape(-1, ggml.row_bytes(tensor.type, tensor.shape[0]))


def _add_weight(graph: CpuGraph, tensor: TensorInfo, blocks: NDArray[np.uint8]) -> int:
    return graph.weight(ggml.TYPE_NUMBERS[tensor.type], tensor.shape[0], blocks)


def _add_vector(graph: CpuGraph, tensor: TensorInfo, blocks: NDArray[np.uint8]) -> int:
    """Return a vector as a tensor of floats with one row."""
    return graph.values(ggml.decode(blocks, tensor.type, tensor.shape[0], label=tensor.name))
