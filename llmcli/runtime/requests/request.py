"""The options of a model run, the requests to the engine, and the answers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from llmcli.runtime.constraint.base import Grammar
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.requests.context_overflow import OverflowPolicy
from llmcli.runtime.requests.draft_counts import DraftCounts
from llmcli.runtime.requests.end_conditions import NO_CONDITIONS, EndConditions
from llmcli.runtime.requests.placement_options import PLACEMENT_FIELDS, PlacementOptions
from llmcli.runtime.requests.thinking import ThinkingLimit
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling.top_logprobs import TokenLogprob, TokenScore
from llmcli.types import Finish, TokenTime


@dataclass(frozen=True, slots=True)
class RunOptions(PlacementOptions):
    """The options of a model run, with those of its devices. None means that the value is chosen
    for the machine and the model.

    - `profile`: the options that a measured profile has set (planning/measurements/tuned_profile.py).
    - `scoring_outputs`: rows of logits that a pass may ask for in addition to one per sequence.
      They are needed to score the tokens of a prompt (Request.score_prompt).
    - `prefill_cells`: cells of a second context that computes prompts (engine/prefill_context.py);
      0 for no such context.
    - `saves_states`: states of answers are saved on disk (disk_cache/), in parts if the cache of the
      model has parts.
    - `adapts_threads`: use fewer threads for tokens while other programs use the processor
      (engine/thread_team.py).
    - `overlaps_passes`: begin the next pass while the texts of drawn tokens are handled
      (engine/pass_ahead.py), because a GPU computes it.
    - `gemm`: "ggml" leaves all matrix products to ggml. "auto" uses llmcli's own code for products
      of many rows where it is faster (binding/kernels/gemm.py).
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
    saves_states: bool = False
    adapts_threads: bool = False
    overlaps_passes: bool = False
    gemm: str = "auto"

    def with_placement(self, placement: PlacementOptions) -> "RunOptions":
        """Return the options with those of the devices from `placement`."""
        return replace(self, **{name: getattr(placement, name) for name in PLACEMENT_FIELDS})

    @property
    def max_rows(self) -> int:
        """Return the largest number of tokens that llama.cpp computes at once (a micro-batch)."""
        return min(self.ubatch_size, self.batch_size)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer that a beam search has found.

    - `tokens`: without the end token.
    - `score`: the sum of log-probabilities divided by length ** length penalty. Sum and length
      include the end token.
    - `is_complete`: the request's grammar accepts the answer, or there is no grammar.
    """

    text: str
    score: float
    tokens: tuple[int, ...]
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """The start of an answer that another process has already sent, so that this process continues
    it after a failure. `finish`: the reason why the answer has ended, or None.
    """

    tokens: tuple[int, ...] = ()
    finish: Finish | None = None


NO_REPLAY = ReplayedAnswer()
# lower than any priority that a client can give a request
BACKGROUND_PRIORITY = -1000


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the settings for its answer.

    - `max_tokens`: None generates until the model stops, the context is full, or the answer only
      repeats itself (see `checks_repetition`).
    - `start_time`: `time.perf_counter()` of the user's call, from which the time to the first token
      is measured.
    - `strategy`: the name of a strategy in runtime/strategies/. `search`: settings of the strategy
      "beam".
    - `grammar`: the grammar that the answer must follow. `grammar_after`: the text in the answer
      after which the grammar starts, such as the end of thinking.
    - `top_logprobs`: with `logprobs`, record this many of the likeliest tokens at each step.
    - `max_context`: the context is full with this many tokens of prompt and answer, even if the
      pool has more cells; None: with those of the pool.
    - `overflow`: what to drop when the context is full. `can_move_cells`: if the prompt leaves out
      a part of a cached text, the cells after that part may be moved instead of being recomputed.
    - `turn`: the number of the turn in its conversation. `earlier_turns`: the numbers of the
      conversation's earlier turns, whose cached cells may be overwritten.
    - `slot`: the slot in which the answer must run; it then reuses only what is cached there. None:
      any slot.
    - `priority`: waiting requests with a higher priority start first. With BACKGROUND_PRIORITY, a
      request only runs while no other one waits, and gives its slot to one that does. `client`: the
      owner of the request; requests of different clients start in turn.
    - `score_prompt`: report the log-probability of every prompt token after the first, and of the
      end token. The prompt is then recomputed, because the cache stores no logits.
    - `reports_progress`: report how much of the prompt is computed (Engine.on_progress).
    - `replays`: for each sample, the start of its answer that another process has already sent. It
      is empty if there is none. At such a position a token is drawn as usual and then replaced by
      the recorded one. A beam search ignores this, because it sends nothing before its end.
    - `locate`: returns the place in the conversation, such as "message 2 (user)", of the text after
      a given beginning of the prompt's text; "" if it is unknown.
    - `end_conditions`: further conditions for the end of the answer.
    - `thinking`: how long the answer may think; None for a text that is not a conversation, whose
      thinking is not followed. A beam search ignores it.
    - `structure_marks`, `structure_starts`: texts that begin a tool call, anywhere or at the
      beginning of the reply. From there on the answer is not checked for repetition.
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
    max_context: int | None = None
    overflow: OverflowPolicy | None = None
    can_move_cells: bool = False
    slot: int | None = None
    priority: int = 0
    client: str = ""
    score_prompt: bool = False
    reports_progress: bool = False
    replays: tuple[ReplayedAnswer, ...] = ()
    end_conditions: EndConditions = NO_CONDITIONS
    locate: Callable[[str], str] = field(default=lambda beginning: "", compare=False, repr=False)
    thinking: ThinkingLimit | None = None
    structure_marks: tuple[str, ...] = ()
    structure_starts: tuple[str, ...] = ()

    @property
    def is_background(self) -> bool:
        """Return whether all other requests come before this one."""
        return self.priority <= BACKGROUND_PRIORITY

    @property
    def checks_repetition(self) -> bool:
        """Return whether the answer ends if it only repeats itself. A grammar decides itself where
        its answer ends, so only the text before the grammar starts is checked.
        """
        is_constrained = self.grammar is not None and not self.grammar_after
        return not (self.allow_repetition or self.ignore_eos or is_constrained)


@dataclass(frozen=True, slots=True)
class OverflowStats:
    """Counts what was dropped from a full context: `times` tokens were dropped, how many `tokens`,
    and how many whole `turns`. `recomputed`: tokens that stayed but were computed again, because
    their cells could not be moved.
    """

    times: int = 0
    tokens: int = 0
    turns: int = 0
    recomputed: int = 0


NO_OVERFLOW = OverflowStats()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer and its statistics. Times are in milliseconds.

    - `beams`: the results of a beam search, best first. `text` and `tokens` are those of the best.
    - `top_logprobs`: the likeliest tokens of each step. The entry of a step without a draw is
      empty. The tuple is empty when they were not requested.
    - `n_drafted`: drafted tokens that the model has checked; None when the strategy drafts nothing.
      `n_accepted`: how many of them were right. `n_drafts`: how many drafts they were in.
      `drafts`: the same for each method that has drafted, by depth.
    - `n_passes`: passes after the first token; 0 when the strategy drafts nothing.
    - `overflow_stats`: what was dropped from a full context.
    - `error`: the reason why the answer failed. An error that is not a UserError is a bug.
    - `prompt_scores`: the score of each prompt token after the first, if requested. Of several
      samples, only the first has them.
    - `queue_ms`: time from the call to the first pass over the prompt.
    - `slot`: the slot in which the answer ran; -1 if it never ran.
    - `n_thinking`: the tokens between the thinking tags, or as many of them as there are.
    - `answer_start`: the number of tokens before the first one of the reply; None if the answer has
      only thinking.
    - `disk_tokens`: how many of the cached tokens were read from the prefix cache on disk.
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
    n_drafts: int = 0
    drafts: tuple[DraftCounts, ...] = ()
    n_passes: int = 0
    overflow_stats: OverflowStats = NO_OVERFLOW
    error: Exception | None = None
    prompt_scores: tuple[TokenScore, ...] = ()
    queue_ms: float = 0.0
    slot: int = -1
    n_thinking: int = 0
    answer_start: int | None = 0
    disk_tokens: int = 0

    @property
    def n_generated(self) -> int:
        """Return the number of generated tokens."""
        return len(self.tokens)

    @property
    def ttft_ms(self) -> float:
        """Return the milliseconds from the user's call to the text of the first token."""
        return self.tokens[0].ms if self.tokens else 0.0

    @property
    def ttfo_ms(self) -> float | None:
        """Return the milliseconds from the user's call to the text of the first token of the reply,
        which is the first token of all if the model does not think. Return None without a reply.
        """
        start = self.answer_start
        if start is None or start >= len(self.tokens):
            return None
        return sum(token.ms for token in self.tokens[: start + 1])

    @property
    def generate_ms(self) -> float:
        """Return the milliseconds from the first token to the last."""
        return sum(token.ms for token in self.tokens[1:])

    @property
    def tpot_ms(self) -> float:
        """Return the average time per token after the first (time per output token), in
        milliseconds.
        """
        return self.generate_ms / (self.n_generated - 1) if self.n_generated > 1 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Return the average number of tokens of a pass after the first token. Return 0 when the
        strategy drafts nothing.
        """
        return (len(self.tokens) - 1) / self.n_passes if self.n_passes and self.tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of generation after the first token, in tokens per second."""
        return 1000 / self.tpot_ms if self.tpot_ms else 0.0

    @property
    def prompt_per_second(self) -> float:
        """Return the speed of reading the prompt, in tokens per second. Cached tokens do not
        count.
        """
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prompt_ms * 1000 if self.prompt_ms else 0.0


def percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile: the smallest of `values` such that at least the fraction
    `share` (from 0 to 1) of all values are not greater. Return 0 for no values.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
