"""llama.cpp's dry run: finds how many bytes a model and a context would allocate, without loading
the weights.

With `no_alloc` of llama_model_params, llama.cpp reads the header and the vocabulary, lays out the
weights in buffers without memory, and reserves the graphs in the same way (as common/fit.cpp does).
It does not map the file in memory, so the tensors that a real load would map are found in the
model's table of tensors. Only recurrent state is really allocated, and it is small.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.eagle_context import LayerInputs
from llmcli.runtime.binding.contexts.open_context import (
    open_context,
    open_eagle_context,
    open_prediction_context,
)
from llmcli.runtime.binding.contexts.prediction_context import prediction_options
from llmcli.runtime.binding.ggml_tensor import Tensor
from llmcli.runtime.binding.library import ggml
from llmcli.runtime.binding.memory_breakdown import MemoryBreakdown
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.devices import BufferType, read_type_of_buffer
from llmcli.runtime.binding.placement.model_placement import ON_HOST, ModelPlacement

# llama_internal_get_tensor_map (src/llama-model.h) returns a reference to a vector<pair<string,
# ggml_tensor *>>. Bytes of a pair: libstdc++'s string (pointer, length, 16 bytes of buffer), and the
# address of the tensor.
PAIR_BYTES = 40
TARGET_CTX = 256  # cells of the context of a draft's target, which is never computed


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The memory that a context would allocate.

    - `n_ctx`, `n_ubatch`: sizes of the context and of its micro-batches in tokens.
    - `output_bytes`: bytes of the output buffer.
    - `breakdown`: all other bytes, including those of the model. None when this build of llama.cpp
      does not report them.
    """

    n_ctx: int
    n_ubatch: int
    output_bytes: int
    breakdown: MemoryBreakdown | None


class DryRun:
    """A model opened without its weights, to find what it and its contexts would allocate. Made by
    `dry_run`, and unusable after its `with` block.
    """

    def __init__(self, model: Model, target: Context | None = None) -> None:
        """`target`: of the model for which an EAGLE-3 draft drafts; None for any other model."""
        self._model, self._target = model, target

    @contextmanager
    def open_context(self, options: ContextOptions) -> Iterator[DryRunResult]:
        """Open a context with these options without allocating its memory, and yield what it would
        allocate.

        Raises UserError when llama.cpp refuses the options.
        """
        # llmcli's own products have no buffers, but would be counted with those of the CPU
        options = replace(options, gemm_min_rows=0)
        opened = (
            open_context(self._model, options)
            if self._target is None
            else open_eagle_context(self._model, LayerInputs(self._target, (), 0, 0), options)
        )
        with opened as context:
            # its size after a pass has asked for the maximum number of rows
            states = context.n_embd * context.n_batch if options.outputs_states else 0
            output = 4 * (context.output_row_values * context.n_outputs + states)
            breakdown = context.memory_breakdown()
            if options.outputs_states:
                with open_prediction_context(
                    self._model, context, prediction_options(options)
                ) as prediction:
                    output += 4 * (prediction.n_vocab + prediction.n_embd)
                    added = prediction.memory_breakdown()
                breakdown = breakdown.with_context(added) if breakdown and added else None
            yield DryRunResult(context.n_ctx, context.n_ubatch, output, breakdown)

    def tensor_buffers(self) -> list[tuple[str, BufferType]] | None:
        """Return the name of each tensor of the model with the type of buffer that it would be
        loaded into. A tensor that is used twice (a tied head) is listed twice.

        Return None when this build of llama.cpp does not export its table of tensors, or lays it
        out differently.
        """
        function = contract.optional_function(ggml(), contract.TENSOR_MAP)
        if function is None or not sys.platform.startswith("linux"):
            return None
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        first, last = _words(function(self._model.pointer), 2)
        if not 0 <= last - first <= PAIR_BYTES << 24 or (last - first) % PAIR_BYTES:
            return None
        return [_tensor(address) for address in range(first, last, PAIR_BYTES)]


@contextmanager
def dry_run(
    path: Path, placement: ModelPlacement, target: Path | None = None, load_mtp: bool = False
) -> Iterator[DryRun]:
    """Open a GGUF file without loading its weights. The file must have passed `check_loadable`. The
    arguments and the errors raised are those of `open_model`. `target`: the file of the model for
    which an EAGLE-3 draft drafts.
    """
    with ExitStack() as stack:
        context = None
        if target is not None:
            model = stack.enter_context(open_model(target, ON_HOST, dry_run=True))
            context = stack.enter_context(open_context(model, ContextOptions(TARGET_CTX)))
        opened = open_model(path, placement, dry_run=True, load_mtp=load_mtp)
        yield DryRun(stack.enter_context(opened), context)


def _tensor(pair: int) -> tuple[str, BufferType]:
    """Return the name and the buffer type of a tensor. `pair`: the address of its entry in
    llama.cpp's table of tensors.
    """
    name, length, _, _, tensor = _words(pair, 5)
    (buffer,) = _words(tensor + Tensor.buffer.offset, 1)
    return ctypes.string_at(name, length).decode("utf-8", "replace"), read_type_of_buffer(buffer)


def _words(address: int, count: int) -> Any:
    """Return `count` unsigned 64-bit integers in memory from `address` on."""
    return (ctypes.c_uint64 * count).from_address(address)
