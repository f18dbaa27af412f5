"""A measurement of whether this CPU computes attention faster without flash attention. It runs once
for each shape of heads, and the result is saved.

The result depends on the processor. A stub model with the same heads and hardly any weights is
measured instead of the real model.
"""

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import rpc_workers
from llmcli.planning import attention_stub, tuned_profile
from llmcli.planning.attention_stub import HeadShape
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context

DEPTH_TOKENS, MAX_CELLS = (
    512,
    2048,
)  # tokens in the cache before the measured ones; maximum cells of all answers together
# Rows of a measured prompt, and of a micro-batch. There are not more, because without flash
# attention the scores of a micro-batch are stored.
PROMPT_ROWS = 256
# prompt passes and generated tokens of one exchange, as in the objective "chat" of bench tune
EXCHANGE_PASSES = 512 // PROMPT_ROWS, 128
# Measured token passes and prompt passes of each variant, in alternating order. The shortest pass
# counts, because other programs can only make a pass longer.
TOKEN_PASSES, PROMPT_PASSES = 12, 3
# maximum ratio of the time without flash attention to the time with it; the margin below 1 allows
# for noise
MAX_PLAIN_RATIO = 0.85
# If the median pass takes more than this many times the shortest one, the machine was busy, and the
# result is not saved.
MAX_MEDIAN_RATIO = 1.3
MAX_FILE_BYTES = 1 << 12  # maximum bytes of a saved result


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The conditions of a measurement, on which its result depends. `parallel`: number of answers
    at a time. If there are several, a separate context computes their prompts.
    """

    heads: HeadShape
    type_k: str
    type_v: str
    threads: int
    threads_batch: int
    parallel: int


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Seconds for one exchange (a prompt and its answer) on the stub model: with flash attention
    (`flash`) and without (`plain`).
    """

    flash: float
    plain: float

    @property
    def is_faster_without_flash(self) -> bool:
        """Whether attention is clearly faster without flash attention."""
        return self.plain < MAX_PLAIN_RATIO * self.flash


def is_faster_without_flash(case: AttentionCase, config: Config) -> bool:
    """Return whether attention is clearly faster without flash attention. The result comes from a
    saved measurement or, if there is none, from a new one.
    """
    path = cache_path(case, config)
    times = _read(path)
    if times is None:
        try:
            times, steady = measure_attention(case)
        # Without space for the stub model or its file, keep flash attention; the real model may
        # still fit.
        except (UserError, OSError):
            return False
        if steady:
            # if the result cannot be saved, the next run measures again
            with suppress(UserError):
                write_atomically(
                    path, (json.dumps({"version": 1, **asdict(times)}) + "\n").encode()
                )
    return times.is_faster_without_flash


def cache_path(case: AttentionCase, config: Config) -> Path:
    """Return the file in which the result for this case, machine and build is saved."""
    key = json.dumps(
        [asdict(case), rpc_workers.machine_and_workers(), tuned_profile.build_identity()]
    )
    return config.cache / "attention" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> AttentionTimes | None:
    """Return the saved result; None if the file is missing or invalid."""
    try:
        with path.open("rb") as file:
            stored = json.loads(file.read(MAX_FILE_BYTES))
        return (
            AttentionTimes(float(stored["flash"]), float(stored["plain"]))
            if stored["version"] == 1
            else None
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def measure_attention(case: AttentionCase) -> tuple[AttentionTimes, bool]:
    """Measure attention with and without flash attention in alternating order. The second value is
    whether the machine was quiet enough to save the result.

    Takes half a second for small heads.
    """
    behind = min(DEPTH_TOKENS, MAX_CELLS // case.parallel)
    n_ctx = (behind + 2 * TOKEN_PASSES) * case.parallel + PROMPT_ROWS
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
        model = stack.enter_context(open_model(path, gpu_layers=0, latent=False))
        contexts = [
            stack.enter_context(open_context(model, replace(options, flash_attn=flash)))
            for flash in ("on", "off")
        ]
        for context in contexts:
            _fill(context, case.parallel, behind)
        passes = _timed(
            contexts,
            TOKEN_PASSES,
            lambda context, number: _answer(context, case.parallel, behind + number),
        )
        steady = all(
            statistics.median(seconds) < MAX_MEDIAN_RATIO * min(seconds) for seconds in passes
        )
        answers = [min(seconds) for seconds in passes]
        # Parallel prompts always use flash attention, so they take the same time in both variants.
        if case.parallel > 1:
            return AttentionTimes(*answers), steady
        prompts = [
            min(seconds)
            for seconds in _timed(contexts, PROMPT_PASSES, lambda context, number: _prompt(context))
        ]
        n_prompts, tokens = EXCHANGE_PASSES
        return AttentionTimes(
            *(
                n_prompts * prompt + tokens * seconds
                for prompt, seconds in zip(prompts, answers, strict=True)
            )
        ), steady


def _fill(context: Context, parallel: int, behind: int) -> None:
    """Fill each of the `parallel` sequences with the same `behind` tokens."""
    context.decode(BatchRows([1] * behind, list(range(behind)), [0] * behind, [False] * behind))
    state = context.read_state(0)
    for sequence in range(1, parallel):
        restored = context.write_state(sequence, state)
        assert restored, "there is room for all"


def _answer(context: Context, parallel: int, at: int) -> None:
    context.decode(
        BatchRows([1] * parallel, [at] * parallel, list(range(parallel)), [True] * parallel)
    )


def _prompt(context: Context) -> None:
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


def _timed(
    ways: list[Context], times: int, work: Callable[[Context, int], None]
) -> list[list[float]]:
    """Return the seconds of `times` passes in each context. The contexts are measured in
    alternating order; a first pass in each is not timed.
    """
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(times + 1):
        for samples, context in zip(seconds, ways, strict=True):
            begun = time.perf_counter()
            work(context, number)
            samples.append(time.perf_counter() - begun)
    return [each[1:] for each in seconds]
