"""Builds OpenAI's `logprobs` objects. An entry has the full text of its token, even if the stream
has not sent this text yet (it may be the beginning of a stop sequence).
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmcli.api.bodies.generation_fields import GenerationBody
from llmcli.api.forms.base import Document
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling.top_logprobs import MAX_TOP_LOGPROBS, TokenLogprob, TokenScore
from llmcli.types import Event, TokenTime

MAX_ALTERNATIVES = 20  # OpenAI's limit of alternatives for a token
MAX_NATIVE_ALTERNATIVES = MAX_TOP_LOGPROBS  # for llama-server's `n_probs`
IMPOSSIBLE_LOGPROB = -9999.0  # OpenAI's value for an impossible token: JSON has no infinity


@dataclass(frozen=True, slots=True)
class LogprobStyle:
    """How log-probabilities are written.

    - `is_post_sampling`: they are those after the sampler steps, and are written as probabilities,
      as in llama-server.
    - `names_ids`: a token is named `token_id:NUMBER` instead of its text, as in vLLM.
    """

    is_post_sampling: bool = False
    names_ids: bool = False

    @classmethod
    def of(cls, body: GenerationBody) -> "LogprobStyle":
        """Return the style that a request asks for."""
        return cls(bool(body.post_sampling_probs), bool(body.return_tokens_as_token_ids))

    def name(self, token: int, text: str) -> str:
        """Return the name of a token. `text`: its text."""
        return f"token_id:{token}" if self.names_ids else text


PLAIN_STYLE = LogprobStyle()


def token_logprobs(
    runner: Runner,
    token: TokenTime,
    top: Sequence[tuple[int, float]],
    style: LogprobStyle = PLAIN_STYLE,
) -> Document:
    """Return the entry of a token in `logprobs.content` of a chat completion. `top`: the likeliest
    tokens at this position, as pairs of a token id and a log-probability.
    """
    key = "top_probs" if style.is_post_sampling else "top_logprobs"
    return {
        **_token_document(runner, token.id, token.logprob, style),
        key: [_token_document(runner, *candidate, style) for candidate in top],
    }


def answer_logprobs(
    runner: Runner, answer: Answer, style: LogprobStyle = PLAIN_STYLE
) -> list[Document]:
    """Return the entries of all tokens of an answer. A token that the grammar forced has the
    log-probability 0, because it was not sampled.
    """
    top = answer.top_logprobs or ((),) * len(answer.tokens)
    return [
        token_logprobs(runner, token, alternatives, style)
        for token, alternatives in zip(answer.tokens, top, strict=True)
    ]


def event_logprobs(
    runner: Runner, event: Event, style: LogprobStyle = PLAIN_STYLE
) -> Document | None:
    """Return the logprobs object of a chunk with the event's token, or None if the event has no
    token.
    """
    if not event.token:
        return None
    entry = token_logprobs(runner, event.token, event.top_logprobs, style)
    return {"content": [entry], "refusal": None}


class TextOffsets:
    """Counts the characters of a text whose tokens arrive one by one. A character may consist of
    several tokens. `start`: the number of characters before the first token.
    """

    def __init__(self, start: int = 0) -> None:
        self._position = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, raw: bytes) -> int:
        """Return the position of the next token, whose bytes are `raw`."""
        position = self._position
        self._position += len(self._decoder.decode(raw))
        return position


def completion_logprobs(
    runner: Runner,
    tokens: Sequence[TokenTime],
    top: Sequence[Sequence[TokenLogprob]],
    offsets: TextOffsets,
    style: LogprobStyle = PLAIN_STYLE,
) -> Document:
    """Return the logprobs object of /v1/completions, which consists of four lists with an entry for
    each token. `top`: for each token, the likeliest tokens at its position; may be empty.
    `offsets`: counts the characters of the choice's text.
    """
    return {
        "tokens": [style.name(token.id, token_name(runner, token.id)) for token in tokens],
        "token_logprobs": [finite_logprob(token.logprob) for token in tokens],
        "top_logprobs": [_ranked(runner, row, style) for row in top] or None,
        "text_offset": [offsets.advance(_token_bytes(runner, token.id)) for token in tokens],
    }


def _ranked(
    runner: Runner, row: Sequence[tuple[int, float]], style: LogprobStyle
) -> dict[str, float]:
    """Return the log-probabilities of tokens by their names. Of several tokens with the same text,
    the first has its text as its name, and each other its id.
    """
    ranked: dict[str, float] = {}
    for token, value in row:
        name = style.name(token, token_name(runner, token))
        ranked[f"token_id:{token}" if name in ranked else name] = value
    return ranked


def prompt_logprobs(
    runner: Runner,
    tokens: Sequence[int],
    scores: Sequence[TokenScore],
    echo: str,
    style: LogprobStyle = PLAIN_STYLE,
) -> Document:
    """Return the logprobs object of a prompt for /v1/completions with `echo`. `scores`: the
    log-probability of each token after the first; the first token has none. `echo`: the prompt's
    text in the response; the offsets are positions in it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(_token_bytes(runner, token))) for token in tokens]
    # characters that the tokens have in addition to `echo`: BOS, SentencePiece's leading space
    n_hidden = max(0, sum(lengths) - len(echo))
    ranked = []
    for id_, score in zip(tokens[1:], scores, strict=True):
        others = [entry for entry in score.top if entry.token != id_]
        ranked.append(_ranked(runner, [(id_, finite_logprob(score.logprob)), *others], style))
    return {
        "tokens": [style.name(token, token_name(runner, token)) for token in tokens],
        "token_logprobs": [None, *(finite_logprob(score.logprob) for score in scores)],
        "top_logprobs": [None, *ranked] if any(score.top for score in scores) else None,
        "text_offset": [max(0, start - n_hidden) for start in accumulate(lengths[:-1], initial=0)],
    }


def join_logprobs(prompt: Document, answer: Document) -> Document:
    """Return a logprobs object with the prompt's entries followed by the answer's entries."""
    return {name: (prompt[name] or []) + (answer[name] or []) or None for name in prompt}


def token_name(runner: Runner, token: int) -> str:
    """Return the text of a token; of a control token, its name. A part of a character is written
    with its bytes, as in OpenAI's API: `bytes:\\xf0\\x9f`.
    """
    raw = _token_bytes(runner, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _token_bytes(runner: Runner, token: int) -> bytes:
    return runner.model.piece(token) or runner.model.piece(token, special=True)


def finite_logprob(value: float | None) -> float:
    """Return a log-probability as a number that JSON can contain: at least IMPOSSIBLE_LOGPROB.
    None, the value of a token that was not sampled, becomes 0.
    """
    return 0.0 if value is None else max(IMPOSSIBLE_LOGPROB, value)


def _token_document(
    runner: Runner, number: int, value: float | None, style: LogprobStyle
) -> Document:
    raw = _token_bytes(runner, number)
    logprob = finite_logprob(value)
    return {
        "token": style.name(number, raw.decode("utf-8", "replace")),
        **({"prob": math.exp(logprob)} if style.is_post_sampling else {"logprob": logprob}),
        "bytes": list(raw),
        "id": number,
    }
