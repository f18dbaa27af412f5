"""Requests to the engine and their answers: frozen values."""

from dataclasses import dataclass

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Grammar
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.requests.context_overflow import OverflowPolicy
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling.top_logprobs import TokenLogprob, TokenScore
from llmcli.types import Finish, TokenTime


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a model. None means that the machine and the model decide.

    - `profile`: which options a measured profile has set (planning/tuned_profile.py).
    - `scoring_outputs`: rows of logits that a pass may ask for beyond one per sequence, for prompts
      whose own tokens are scored (Request.score_prompt).
    - `prefill_cells`: cells of a second context that computes prompts (engine/prefill_context.py);
      0 for none.
    - `gemm`: "ggml" leaves all products to ggml, "auto" uses llmcli's own kernels for products of
      many rows where they are faster (binding/kernels/gemm.py).
    """

    ctx_size: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    batch_size: int = 2048
    ubatch_size: int = 512
    gpu_layers: str = "auto"
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    reproducible: bool = False
    profile: str = ""
    scoring_outputs: int = 0
    prefill_cells: int = 0
    gemm: str = "auto"

    @property
    def max_rows(self) -> int:
        """Return the maximum number of rows that are computed at once."""
        return min(self.ubatch_size, self.batch_size)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer of a beam search: its tokens without the end token, and its score, the sum of
    log-probabilities divided by length ** length penalty (both count the end token).

    `is_complete`: the request's grammar accepts it, or there is no grammar.
    """

    text: str
    score: float
    tokens: tuple[int, ...]
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """What another process already sent of an answer: its first tokens and, if it ended, its
    finish.
    """

    tokens: tuple[int, ...] = ()
    finish: Finish | None = None


NO_REPLAY = ReplayedAnswer()


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it.

    - `max_tokens`: None generates until the model stops, the context is full, or the answer only
      repeats itself. `allow_repetition` (and `ignore_eos`) allow repetition.
    - `start_time`: `time.perf_counter()` of the call with the text, from which the time to the
      first token counts.
    - `strategy`: a name of runtime/strategies/. `search`: settings of the strategy "beam".
    - `grammar`: what the answer must follow, starting after the text `grammar_after` (the end of
      thinking).
    - `top_logprobs`: with `logprobs`, record this many of the likeliest tokens at each step.
    - `overflow`: what is dropped when the context is full. `can_move_cells`: cells after a gap may
      be moved up instead of being recomputed.
    - `turn`: its number in a conversation. `earlier_turns`: the earlier turns, whose cached cells
      may be overwritten.
    - `priority`: waiting requests with a higher one go first. `client`: its owner; clients take
      turns.
    - `score_prompt`: report the log-probability of every prompt token and of the end token. The
      prompt is recomputed, because the cache keeps no logits.
    - `replays`: for each sample what another process already sent; empty for none. A replayed token
      is drawn like any other and then replaced by the recorded one. A beam search, which sends
      nothing before its end, ignores them.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    start_time: float | None = None
    strategy: str = "plain"
    search: BeamSettings = NO_SEARCH
    allow_repetition: bool = False
    top_logprobs: int = 0
    turn: int = 0
    earlier_turns: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    grammar_after: str = ""
    overflow: OverflowPolicy | None = None
    can_move_cells: bool = False
    priority: int = 0
    client: str = ""
    score_prompt: bool = False
    replays: tuple[ReplayedAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class OverflowStats:
    """What was dropped from a full context: how often, how many tokens and whole turns, and how
    many of the remaining tokens were recomputed because they could not be moved.
    """

    times: int = 0
    tokens: int = 0
    turns: int = 0
    recomputed: int = 0


NO_OVERFLOW = OverflowStats()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer and its statistics. Times are in milliseconds.

    - `beams`: the results of a beam search, best first; text and tokens are the first one's.
    - `top_logprobs`: the likeliest tokens of each step, empty for steps without a draw and when not
      requested.
    - `n_drafted`, `n_accepted`: guessed tokens that were computed, and those that were right; None
      when nothing was guessed.
    - `overflow_stats`: what was dropped from the context.
    - `error`: why it failed.
    - `prompt_scores`: for each prompt token but the first, if requested; among samples only the
      first has it.
    - `queue_ms`: from the call to the first pass over its prompt.
    """

    text: str
    tokens: tuple[TokenTime, ...]
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    prompt_ms: float
    seed: int
    beams: tuple[Hypothesis, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    n_drafted: int | None = None
    n_accepted: int = 0
    overflow_stats: OverflowStats = NO_OVERFLOW
    error: UserError | None = None
    prompt_scores: tuple[TokenScore, ...] = ()
    queue_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """Return the milliseconds from the call with the text to the first token's text."""
        return self.tokens[0].ms if self.tokens else 0.0

    @property
    def generate_ms(self) -> float:
        """Return the milliseconds from the first token to the last."""
        return sum(token.ms for token in self.tokens[1:])

    @property
    def tpot_ms(self) -> float:
        """Return the milliseconds per token after the first."""
        return self.generate_ms / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens after the first per second of generation."""
        return 1000 / self.tpot_ms if self.tpot_ms else 0.0

    @property
    def prompt_per_second(self) -> float:
        """Return the computed prompt tokens per second; cached tokens do not count."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prompt_ms * 1000 if self.prompt_ms else 0.0


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile: the smallest value that at least `share` of the values do
    not exceed; 0 for no values.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
