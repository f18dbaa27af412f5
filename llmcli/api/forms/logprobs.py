"""Builds OpenAI's `logprobs` objects. An entry has the full text of its token, even if the stream
has not sent this text yet (it may be the beginning of a stop sequence).
"""

import codecs
from collections.abc import Sequence
from itertools import accumulate

from llmcli.api.forms.base import Document
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling.top_logprobs import TokenLogprob, TokenScore
from llmcli.types import Event, TokenTime

MAX_ALTERNATIVES = 20  # OpenAI's limit of alternatives for a token
IMPOSSIBLE_LOGPROB = -9999.0  # OpenAI's value for an impossible token: JSON has no infinity


def token_logprobs(runner: Runner, token: TokenTime, top: Sequence[tuple[int, float]]) -> Document:
    """Return the entry of a token in `logprobs.content` of a chat completion. `top`: the likeliest
    tokens at this position, as pairs of a token id and a log-probability.
    """
    return {
        **_token_document(runner, token.id, token.logprob),
        "top_logprobs": [_token_document(runner, *candidate) for candidate in top],
    }


def answer_logprobs(runner: Runner, answer: Answer) -> list[Document]:
    """Return the entries of all tokens of an answer. A token that the grammar forced has the
    log-probability 0, because it was not sampled.
    """
    top = answer.top_logprobs or ((),) * len(answer.tokens)
    return [
        token_logprobs(runner, token, alternatives)
        for token, alternatives in zip(answer.tokens, top, strict=True)
    ]


def event_logprobs(runner: Runner, event: Event) -> Document | None:
    """Return the logprobs object of a chunk with the event's token, or None if the event has no
    token.
    """
    return (
        {"content": [token_logprobs(runner, event.token, event.top_logprobs)], "refusal": None}
        if event.token
        else None
    )


def completion_logprobs(
    runner: Runner, tokens: Sequence[TokenTime], top: Sequence[Sequence[TokenLogprob]], start: int
) -> Document:
    """Return the logprobs object of /v1/completions, which consists of four lists with an entry for
    each token. `top`: for each token, the likeliest tokens at its position; may be empty. `start`:
    the position of the first token in the choice's text, in characters.
    """
    texts = [token_text(runner, token.id) for token in tokens]
    offsets = [*accumulate(map(len, texts), initial=start)][:-1]
    ranked = [{token_text(runner, id_): value for id_, value in row} for row in top]
    return {
        "tokens": texts,
        "token_logprobs": [finite_logprob(token.logprob) for token in tokens],
        "top_logprobs": ranked or None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    runner: Runner, tokens: Sequence[int], scores: Sequence[TokenScore], echo: str
) -> Document:
    """Return the logprobs object of a prompt for /v1/completions with `echo`. `scores`: the
    log-probability of each token after the first; the first token has none. `echo`: the prompt's
    text in the response; the offsets are positions in it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(_token_bytes(runner, token))) for token in tokens]
    # characters that the tokens have in addition to `echo`: BOS, SentencePiece's leading space
    n_hidden = max(0, sum(lengths) - len(echo))
    ranked = [
        {
            token_text(runner, id_): finite_logprob(token.logprob),
            **{token_text(runner, id_): value for id_, value in token.top},
        }
        for id_, token in zip(tokens[1:], scores, strict=True)
    ]
    return {
        "tokens": [token_text(runner, token) for token in tokens],
        "token_logprobs": [None, *(finite_logprob(token.logprob) for token in scores)],
        "top_logprobs": [None, *ranked] if any(token.top for token in scores) else None,
        "text_offset": [max(0, start - n_hidden) for start in accumulate(lengths[:-1], initial=0)],
    }


def join_logprobs(prompt: Document, answer: Document) -> Document:
    """Return a logprobs object with the prompt's entries followed by the answer's entries."""
    return {name: (prompt[name] or []) + (answer[name] or []) or None for name in prompt}


def token_text(runner: Runner, token: int) -> str:
    """Return the text of a token; of a control token, its name."""
    return _token_bytes(runner, token).decode("utf-8", "replace")


def _token_bytes(runner: Runner, token: int) -> bytes:
    return runner.model.piece(token) or runner.model.piece(token, special=True)


def finite_logprob(value: float | None) -> float:
    """Return a log-probability as a number that JSON can contain: at least IMPOSSIBLE_LOGPROB.
    None, the value of a token that was not sampled, becomes 0.
    """
    return 0.0 if value is None else max(IMPOSSIBLE_LOGPROB, value)


def _token_document(runner: Runner, number: int, value: float | None) -> Document:
    raw = _token_bytes(runner, number)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": finite_logprob(value),
        "bytes": list(raw),
        "id": number,
    }
