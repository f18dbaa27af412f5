"""Measure whether this CPU computes attention faster without flash attention, and save the result.

A stub model (attention_stub.py), which has the heads of the real model and hardly any weights, is
measured instead of the real model.
"""

import functools
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import rpc_workers
from llmcli.planning.measurements import attention_stub, tuned_profile
from llmcli.planning.measurements.attention_stub import HeadShape
from llmcli.planning.measurements.saved_result import read_or_measure, result_path
from llmcli.planning.measurements.turns import are_steady, time_in_turns
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.binding.rows.batch import BatchRows

# tokens in the cache of each answer before the measured ones, and maximum cells of all answers
DEPTH_TOKENS, MAX_CELLS = 512, 2048
# Tokens of a measured prompt, and of a micro-batch. The number is low, because without flash
# attention the attention scores of a micro-batch are stored.
PROMPT_ROWS = 256
# prompt passes and generated tokens of one exchange, as in the objective "chat" of bench tune
EXCHANGE_PASSES = 512 // PROMPT_ROWS, 128
# Number of measured passes with and without flash attention: passes that generate tokens, and
# passes of a prompt. The shortest pass counts, because other programs can only make a pass longer.
TOKEN_PASSES, PROMPT_PASSES = 12, 3
# Flash attention is turned off only if the time without it is less than this share of the time with
# it. The margin below 1 allows for noise.
MAX_PLAIN_RATIO = 0.85


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The conditions of a measurement. A saved result is used only for equal conditions."""

    heads: HeadShape
    type_k: str
    type_v: str
    threads: int
    threads_batch: int
    # Number of answers that are generated at once. If there are several, a separate context, which
    # always uses flash attention, computes their prompts.
    parallel: int


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """The seconds that the stub model takes for one exchange: a prompt and its answer."""

    flash: float  # with flash attention
    plain: float  # without flash attention

    @property
    def is_faster_without_flash(self) -> bool:
        """Return whether attention is clearly faster without flash attention, beyond noise."""
        return self.plain < MAX_PLAIN_RATIO * self.flash


def is_faster_without_flash(case: AttentionCase, config: Config) -> bool:
    """Return whether attention is clearly faster without flash attention under the conditions of
    `case`. If no result is saved, it is measured and saved. False if it cannot be measured.
    """
    try:
        times = read_or_measure(
            cache_path(case, config), AttentionTimes, lambda: measure_attention(case)
        )
    # There is no memory for the stub model, or no space for its file. The real model may still fit,
    # so this is no error.
    except (UserError, OSError):
        return False
    return times.is_faster_without_flash


def cache_path(case: AttentionCase, config: Config) -> Path:
    """Return the path of the file with the result for this case, this machine and this build of
    llama.cpp. The file may not exist.
    """
    return result_path(
        config,
        "attention",
        asdict(case),
        products.library_name(),  # which has attention of its own
        rpc_workers.machine_and_workers(),
        tuned_profile.build_identity(),
    )


def measure_attention(case: AttentionCase) -> tuple[AttentionTimes, bool]:
    """Measure the stub model with and without flash attention, alternately. Return the times, and
    whether other programs were quiet enough that the times may be saved.

    Raises UserError when there is no memory for the stub, and OSError when its file cannot be
    written.
    """
    depth = min(DEPTH_TOKENS, MAX_CELLS // case.parallel)
    n_ctx = (depth + 2 * TOKEN_PASSES) * case.parallel + PROMPT_ROWS
    options = ContextOptions(
        n_ctx,
        DEPTH_TOKENS,
        PROMPT_ROWS,
        case.parallel + 1,
        case.threads,
        case.threads_batch,
        case.type_k,
        case.type_v,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "standin.gguf"
        path.write_bytes(attention_stub.build_stub_model(case.heads, n_ctx))
        model = stack.enter_context(open_model(path, replace(ON_HOST, latent=False)))
        contexts = [
            stack.enter_context(open_context(model, replace(options, flash_attn=flash)))
            for flash in ("on", "off")
        ]
        for context in contexts:
            _fill_sequences(context, case.parallel, depth)
        passes = time_in_turns(
            [
                functools.partial(_generate_tokens, context, case.parallel, depth)
                for context in contexts
            ],
            TOKEN_PASSES,
        )
        is_steady = are_steady(passes)
        token_seconds = [min(seconds) for seconds in passes]
        # The prompts of parallel answers always use flash attention, so only the tokens matter.
        if case.parallel > 1:
            return AttentionTimes(*token_seconds), is_steady
        prompt_seconds = [
            min(seconds)
            for seconds in time_in_turns(
                [functools.partial(_compute_prompt, context) for context in contexts], PROMPT_PASSES
            )
        ]
        n_prompt_passes, n_tokens = EXCHANGE_PASSES
        return AttentionTimes(
            *(
                n_prompt_passes * per_prompt + n_tokens * per_token
                for per_prompt, per_token in zip(prompt_seconds, token_seconds, strict=True)
            )
        ), is_steady


def _fill_sequences(context: Context, parallel: int, depth: int) -> None:
    """Put the same `depth` tokens into the cache of each of the first `parallel` sequences. They
    are computed once and copied.
    """
    context.decode(BatchRows([1] * depth, list(range(depth)), [0] * depth, [False] * depth))
    state = context.read_state(0)
    for sequence in range(1, parallel):
        restored = context.write_state(sequence, state)
        assert restored, "there is room for all"


def _generate_tokens(context: Context, parallel: int, depth: int, number: int) -> None:
    """Compute one token of each sequence in one pass, `number` tokens after the first `depth`."""
    position = depth + number
    context.decode(
        BatchRows([1] * parallel, [position] * parallel, list(range(parallel)), [True] * parallel)
    )


def _compute_prompt(context: Context, number: int) -> None:
    """Compute a prompt of PROMPT_ROWS tokens in the last sequence, which is emptied first. All
    prompts are equal, whatever their `number`.
    """
    spare = context.n_seq_max - 1
    context.trim(spare, 0)
    context.decode(
        BatchRows(
            [1] * PROMPT_ROWS,
            list(range(PROMPT_ROWS)),
            [spare] * PROMPT_ROWS,
            [False] * PROMPT_ROWS,
        )
    )
