"""Whether attention answers sooner without flash attention on this CPU: measured once for heads of
a shape, and kept.

It is the processor's affair. Behind 512 tokens each, a pass of one, four and eight answers of
SmolLM2-135M took 20, 53 and 98 ms with it and 12, 36 and 76 without on two threads of a Xeon with
AMX, and 11, 33 and 58 against 12, 46 and 100 on an EPYC with AVX-512 (2026-11-22). So a stand-in
(standin.py) is asked, which has the heads and hardly any weights.
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

from llmcli.atomic_files import write_whole
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import rpc_workers
from llmcli.planning import attention_stub, tuned_profile
from llmcli.planning.attention_stub import Heads
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context

BEHIND, CELLS = 512, 2048  # tokens before an answer's next one; of all answers together, at most
# of a prompt that is measured, and of a micro-batch: without flash attention its scores are written
# out
ROWS = 256
EXCHANGE = 512 // ROWS, 128  # times those, and tokens of the answer: bench tune's "chat"
TIMES, FEW = (
    12,
    3,
)  # passes of each way, in turn: the shortest counts, for others' work only lengthens them
WORTH = 0.85  # of the other way's time: a busy machine has told 0.89 where a quiet one tells 1.9
# times the shortest pass may the median one take: else the machine was busy, and nothing is kept
STEADY = 1.3
LARGEST = 1 << 12  # bytes of a kept answer that are read at all


@dataclass(frozen=True, slots=True)
class Question:
    """What the answer depends on: `parallel` answers at once, whose prompts are read apart where
    there are several.
    """

    heads: Heads
    type_k: str
    type_v: str
    threads: int
    threads_batch: int
    parallel: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one exchange in the stand-in, with flash attention and without."""

    flash: float
    plain: float

    @property
    def sooner_without(self) -> bool:
        """Whether it is clearly faster to do without."""
        return self.plain < WORTH * self.flash


def sooner_without(question: Question, config: Config) -> bool:
    """Whether answers come clearly sooner without flash attention: as measured here before, or now."""
    path = place(question, config)
    known = _read(path)
    if known is None:
        try:
            known, steady = measure(question)
        except (
            UserError,
            OSError,
        ):  # no room for the stand-in, or for its file: the model's own may still be had
            return False
        if steady:
            with suppress(
                UserError
            ):  # of a folder that cannot be written: next time it is measured again
                write_whole(path, (json.dumps({"version": 1, **asdict(known)}) + "\n").encode())
    return known.sooner_without


def place(question: Question, config: Config) -> Path:
    """Where an answer is kept, for this machine and build."""
    world = json.dumps([asdict(question), rpc_workers.identity(), tuned_profile.build()])
    return config.cache / "attention" / f"{hashlib.sha256(world.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> Times | None:
    """What was kept; None where nothing was that can be used."""
    try:
        with path.open("rb") as file:
            told = json.loads(file.read(LARGEST))
        return Times(float(told["flash"]), float(told["plain"])) if told["version"] == 1 else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def measure(question: Question) -> tuple[Times, bool]:
    """Both ways in turn, half a second for small heads; and whether the machine was quiet enough to
    tell.
    """
    behind = min(BEHIND, CELLS // question.parallel)
    n_ctx = (behind + 2 * TIMES) * question.parallel + ROWS
    options = ContextOptions(
        n_ctx,
        BEHIND,
        ROWS,
        question.parallel + 1,
        question.threads,
        question.threads_batch,
        question.type_k,
        question.type_v,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "standin.gguf"
        path.write_bytes(attention_stub.written(question.heads, n_ctx))
        model = stack.enter_context(open_model(path, gpu_layers=0, latent=False))
        ways = [
            stack.enter_context(open_context(model, replace(options, flash_attn=flash)))
            for flash in ("on", "off")
        ]
        for context in ways:
            _fill(context, question.parallel, behind)
        passes = _timed(
            ways,
            TIMES,
            lambda context, number: _answer(context, question.parallel, behind + number),
        )
        steady = all(statistics.median(each) < STEADY * min(each) for each in passes)
        answers = [min(each) for each in passes]
        if question.parallel > 1:  # prompts are read apart, with flash attention
            return Times(*answers), steady
        prompts = [
            min(each) for each in _timed(ways, FEW, lambda context, number: _prompt(context))
        ]
        often, tokens = EXCHANGE
        return Times(
            *(often * prompt + tokens * each for prompt, each in zip(prompts, answers, strict=True))
        ), steady


def _fill(context: Context, parallel: int, behind: int) -> None:
    """Let each sequence hold so many tokens, all the same."""
    context.decode(BatchRows([1] * behind, list(range(behind)), [0] * behind, [False] * behind))
    state = context.read_state(0)
    for sequence in range(1, parallel):
        good = context.write_state(sequence, state)
        assert good, "there is room for all"


def _answer(context: Context, parallel: int, at: int) -> None:
    context.decode(
        BatchRows([1] * parallel, [at] * parallel, list(range(parallel)), [True] * parallel)
    )


def _prompt(context: Context) -> None:
    spare = context.n_seq_max - 1
    context.trim(spare, 0)
    context.decode(BatchRows([1] * ROWS, list(range(ROWS)), [spare] * ROWS, [False] * ROWS))


def _timed(
    ways: list[Context], times: int, work: Callable[[Context, int], None]
) -> list[list[float]]:
    """Seconds that each way took so many times, in turn; the first of each is not counted."""
    found: list[list[float]] = [[] for _ in ways]
    for number in range(times + 1):
        for way, context in zip(found, ways, strict=True):
            begun = time.perf_counter()
            work(context, number)
            way.append(time.perf_counter() - begun)
    return [each[1:] for each in found]
