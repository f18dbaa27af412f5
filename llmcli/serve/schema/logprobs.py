"""Log-probabilities as OpenAI writes them; a token's text is its own bytes, whatever was shown with
it.
"""

import codecs
from collections.abc import Sequence
from itertools import accumulate

from llmcli.runtime.ranked import Ranked, Scored
from llmcli.runtime.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.serve.schema.base import Document
from llmcli.types import Event, TokenTime

MOST = 20  # alternatives of a token, as OpenAI has it
IMPOSSIBLE = -9999.0  # OpenAI's number for a token that could not come: JSON has no infinity


def token(runner: Runner, one: TokenTime, top: Sequence[tuple[int, float]]) -> Document:
    """One token of a chat's `logprobs.content`."""
    return {
        **_about(runner, one.id, one.logprob),
        "top_logprobs": [_about(runner, *each) for each in top],
    }


def content(runner: Runner, answer: Answer) -> list[Document]:
    """All of them; forced tokens of a grammar were not drawn and stand with 0."""
    top = answer.top or ((),) * len(answer.tokens)
    return [token(runner, one, each) for one, each in zip(answer.tokens, top, strict=True)]


def of_event(runner: Runner, event: Event) -> Document | None:
    """A chunk's logprobs; None where it brings no token."""
    return (
        {"content": [token(runner, event.token, event.top)], "refusal": None}
        if event.token
        else None
    )


def legacy(
    runner: Runner, tokens: Sequence[TokenTime], top: Sequence[Sequence[Ranked]], start: int
) -> Document:
    """Completions' older form: four lists; `start` is where the text of the first token stands."""
    texts = [text(runner, one.id) for one in tokens]
    offsets = [*accumulate(map(len, texts), initial=start)][:-1]
    ranked = [{text(runner, each): value for each, value in row} for row in top]
    return {
        "tokens": texts,
        "token_logprobs": [finite(one.logprob) for one in tokens],
        "top_logprobs": ranked or None,
        "text_offset": offsets,
    }


def of_prompt(
    runner: Runner, tokens: Sequence[int], scores: Sequence[Scored], echo: str
) -> Document:
    """A prompt's own in that form, where it is told as `echo`: nothing is known of the first token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(_raw(runner, one))) for one in tokens]
    unseen = max(0, sum(lengths) - len(echo))  # BOS, SentencePiece's first space
    ranked = [
        {
            text(runner, next_one): finite(one.logprob),
            **{text(runner, each): value for each, value in one.top},
        }
        for next_one, one in zip(tokens[1:], scores, strict=True)
    ]
    return {
        "tokens": [text(runner, one) for one in tokens],
        "token_logprobs": [None, *(finite(one.logprob) for one in scores)],
        "top_logprobs": [None, *ranked] if any(one.top for one in scores) else None,
        "text_offset": [max(0, start - unseen) for start in accumulate(lengths[:-1], initial=0)],
    }


def together(one: Document, other: Document) -> Document:
    """A prompt's and its answer's."""
    return {name: (one[name] or []) + (other[name] or []) or None for name in one}


def text(runner: Runner, token: int) -> str:
    """A token's own text, also where it is a control token."""
    return _raw(runner, token).decode("utf-8", "replace")


def _raw(runner: Runner, token: int) -> bytes:
    return runner.model.piece(token) or runner.model.piece(token, special=True)


def finite(value: float | None) -> float:
    """A number of JSON."""
    return 0.0 if value is None else max(IMPOSSIBLE, value)


def _about(runner: Runner, number: int, value: float | None) -> Document:
    raw = _raw(runner, number)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": finite(value),
        "bytes": list(raw),
        "id": number,
    }
