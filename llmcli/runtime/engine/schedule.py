"""The limits by which passes are divided between requests, and the reported load of an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from llmcli.errors import UserError

# When the states of finished answers leave the pool: when their slots or cells are needed; also when
# by measured cost they slow other answers down by more than copying takes; or always.
IdleOffloadMode = Literal["room", "measured", "always"]


class QueueFull(UserError):
    """Raised when the waiting queue is full. The request was not queued."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Limits for passes and queues. None means no limit except that of the context, which suits a
    single conversation.

    - `max_running`: requests that run at once. If the context has more sequences, the others are
      used to cache prefixes.
    - `max_rows`: rows of a pass. Tokens of answers get rows before those of prompts.
    - `max_chunk_rows`: rows of one prompt in a pass.
    - `max_waiting`: requests that may wait; one more raises QueueFull.
    - `max_gap_seconds`: the time between two tokens of an answer that prompts of other requests
      should not exceed.
    - `share_prefixes`: whether clients share cached prefixes. The response time then reveals
      whether another client sent the same prompt.
    - `host_bytes`: the budget of host memory for the states of all offloaded answers
      (kv_cache/host_budget.py). With 0, preempted answers are recomputed, and finished answers stay
      cached only in the pool.
    - `measure_host_bytes`: measures this budget again from time to time, because other programs may
      take memory. Its argument is the number of bytes that the states take. The smaller one of both
      budgets applies.
    - `idle_offload`: when finished answers leave the pool (kv_cache/offload.py).
    - `min_offload_rows`: if prompts have at least this many rows to compute, they are computed in
      separate passes. These alternate with passes of the answers, whose cells are offloaded in the
      meantime (kv_cache/offload.py).
    - `min_prefill_rows`: a prompt with at least this many rows to compute is computed in the
      prefill context (prefill_context.py), in passes that alternate with passes of the answers.
    """

    max_running: int | None = None
    max_rows: int | None = None
    max_chunk_rows: int | None = None
    max_waiting: int | None = None
    max_gap_seconds: float | None = None
    share_prefixes: bool = True
    host_bytes: int = 0
    measure_host_bytes: Callable[[int], int] | None = None
    idle_offload: IdleOffloadMode = "room"
    min_offload_rows: int | None = None
    min_prefill_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_rows", "max_chunk_rows"):
            limit = getattr(self, name)
            assert limit is None or limit > 0, (name, limit)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The present load of an engine, and its totals.

    - `n_preempted`: waiting requests that were preempted. They are also counted in `n_waiting`.
    - `used_cells`: how many of the `n_cells` cells contain tokens.
    - `prompt_tokens` (computed), `tokens` (generated), `n_preemptions`, `n_passes` (forward passes)
      and `pass_sequences` (the sequences of all passes): totals since the engine was created.
    """

    n_running: int
    n_waiting: int
    n_preempted: int
    used_cells: int
    n_cells: int
    prompt_tokens: int
    tokens: int
    n_preemptions: int
    n_passes: int = 0
    pass_sequences: int = 0
