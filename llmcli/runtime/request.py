"""What is asked of the engine, and what came of it: frozen values that travel whole."""

from dataclasses import dataclass

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Grammar
from llmcli.runtime.overflow import Overflow
from llmcli.runtime.ranked import Ranked, Scored
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.search import NO_SEARCH, Search
from llmcli.types import Finish, TokenTime


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a model is run. None means: decided from the machine and the model. `profile` says which
    of them a measured profile has chosen (hardware/profile.py). `scored`: so many more rows of
    logits may a pass ask for than there are sequences, for prompts whose own tokens are scored
    (Request.scores). `reading`: cells of a context in which prompts are read apart
    (runtime/reader.py); 0: there is none. `gemm`: "ggml" leaves all products to it, "auto" those of
    many rows to our own where they are faster (runtime/binding/gemm.py).
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
    scored: int = 0
    reading: int = 0
    gemm: str = "auto"

    @property
    def rows(self) -> int:
        """The most rows that are computed at once."""
        return min(self.ubatch_size, self.batch_size)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer of a beam search: its tokens without the end token, and the sum of their
    log-probabilities divided by their number ** length penalty (the end token is counted in both).
    `whole`: the request's grammar, if any, accepts it.
    """

    text: str
    score: float
    tokens: tuple[int, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Begun:
    """What another process has told of an answer: its first tokens, and how it ended, where it did."""

    tokens: tuple[int, ...] = ()
    finish: Finish | None = None


NEW = Begun()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it.

    `max_tokens` None means: until the model stops, the context is full, or the answer only repeats
    itself; `endless` (and `ignore_eos`) lets it repeat. `started` is the `time.perf_counter()` of
    the call with the text, from which the time to the first token counts. `strategy` is a name of
    runtime/strategies/, `search` is for the one called beam. `grammar` is what the answer must
    follow, from where it has said `after` (the end of its thinking). `top_logprobs`: with
    `logprobs`, keep as many of the likeliest tokens at each step. `overflow` says what leaves when
    the context is full, `move` that cells behind something that has left may move up instead of
    being computed anew. `turn` is this one's number in its conversation, `path` those before it:
    what the cache holds of them may give way to this one. Of those that wait the one with the
    larger `priority` goes first; `client` is whose it is, so that one who asks much leaves room to
    others. `scores`: tell how likely the prompt's own tokens are, and the one that ends the answer;
    the prompt is computed anew, for the cache keeps no logits. `known`: of each sample what another
    process has told of it, none: of all of them nothing. A known token is drawn like any other, and
    then this one stands in its place. A search of beams, which has told nothing, passes them over.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    started: float | None = None
    strategy: str = "plain"
    search: Search = NO_SEARCH
    endless: bool = False
    top_logprobs: int = 0
    turn: int = 0
    path: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    after: str = ""
    overflow: Overflow | None = None
    move: bool = False
    priority: int = 0
    client: str = ""
    scores: bool = False
    known: tuple[Begun, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """What left a full context: how often, how many tokens and whole turns, and how many of the
    tokens that stayed were computed anew because they could not move.
    """

    times: int = 0
    tokens: int = 0
    turns: int = 0
    recomputed: int = 0


NOTHING = Left()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer and its accounts; times in milliseconds (definitions: the contract's run
    --json).

    `beams`: what a beam search found, best first; its text and tokens are the first one's. `top`:
    for each token the likeliest of its step, none where it was not drawn; empty where nobody asked.
    `drafted` tokens were guessed and computed, `accepted` of them were right; None: nothing was to
    be guessed. `left`: what left the context while it was made. `error` is why it failed, where it
    did. `prompt`: of each token of the prompt but the first, where `scores` asked for it; of
    several answers to one prompt the first has it. `queue_ms`: from the call to the first pass over
    its prompt.
    """

    text: str
    tokens: tuple[TokenTime, ...]
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    prompt_ms: float
    seed: int
    beams: tuple[Hypothesis, ...] = ()
    top: tuple[tuple[Ranked, ...], ...] = ()
    drafted: int | None = None
    accepted: int = 0
    left: Left = NOTHING
    error: UserError | None = None
    prompt: tuple[Scored, ...] = ()
    queue_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        """From the call with the text to the first token's text."""
        return self.tokens[0].ms if self.tokens else 0.0

    @property
    def generate_ms(self) -> float:
        """From the first token to the last."""
        return sum(token.ms for token in self.tokens[1:])

    @property
    def tpot_ms(self) -> float:
        """Milliseconds a token after the first."""
        return self.generate_ms / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second of generating."""
        return 1000 / self.tpot_ms if self.tpot_ms else 0.0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens really computed per second; what was reused does not count."""
        fresh = self.prompt_tokens - self.cached_tokens
        return fresh / self.prompt_ms * 1000 if self.prompt_ms else 0.0


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile: the smallest value that at least `share` of them do not exceed; 0
    for none.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
