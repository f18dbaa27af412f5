"""The position of streamed answers: what another model needs to continue a stream that was
interrupted.

The front server (front.py) gives each request a name, a time and a seed, and sends them along. With
each piece of a stream it receives the marks of its events: number of the answer, token, finish
reason. To continue, another model replays the request: it draws each token that was sent again, but
keeps the one that was sent (`Request.replays`), so that random numbers, penalties and grammars
reach the same state; it sends only the events after that. So the text that a client has read stays
the beginning of its answers. Each answer of a stream continues independently, because events may
arrive in another order. An answer that had ended is not continued, even if other logits (from other
rows in the same pass) would continue it.

These tokens are drawn one by one instead of being read like a prompt, because the state of a
sampling chain depends on every row of logits. So the pause is about as long as the text took.
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmcli.runtime.requests.request import ReplayedAnswer
from llmcli.runtime.sampling import RANDOM_SEED
from llmcli.runtime.sampling.chain import resolve_seed
from llmcli.types import Event, Finish

POSITION_KEY = "llmcli.known"  # in a scope: the position
MARKS_KEY = "llmcli.told"  # in a message: the marks of its bytes
# An event as plain values, which can be sent to another process: number of the answer, token id,
# finish reason.
StreamMark = tuple[int, int | None, Finish | None]


@dataclass(slots=True)
class StreamPosition:
    """The position of a request's answers. `name`: digits of a UUID; `created`: Unix seconds;
    `seed`: for requests without one. By the number of the answer: `tokens` that were sent (an empty
    list if the answer has only begun), and `ends`, the finish reasons.
    """

    name: str
    created: int
    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finish] = field(default_factory=dict)

    def advance(self, marks: Iterable[StreamMark]) -> None:
        """Add the marks of events that were sent."""
        for number, token, finish in marks:
            tokens = self.tokens.setdefault(number, [])
            if token is not None:
                tokens.append(token)
            if finish is not None:
                self.ends[number] = finish

    def replayed_answer(self, number: int) -> ReplayedAnswer:
        """Return the beginning of one answer, to be replayed."""
        return ReplayedAnswer(tuple(self.tokens.get(number, ())), self.ends.get(number))

    def attach_to(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """Return a scope that carries the position as plain values."""
        return {**scope, POSITION_KEY: asdict(self)}


class PastAnswer:
    """Recognizes the events of a stream that were sent before. `has_started`: at least one was
    sent.
    """

    def __init__(self, position: StreamPosition | None) -> None:
        self._left = (
            {number: len(tokens) for number, tokens in position.tokens.items()} if position else {}
        )
        self._ends = position.ends if position else {}
        self.has_started = bool(self._left)

    def includes(self, event: Event) -> bool:
        """Return whether this event was sent before; call it once for each event."""
        if event.token is None:
            return event.finish is not None and event.sequence in self._ends
        remaining = self._left.get(event.sequence, 0)
        self._left[event.sequence] = remaining - 1
        return remaining > 0


def stream_marks(events: Iterable[Event]) -> tuple[StreamMark, ...]:
    """Return the marks of events."""
    return tuple(
        (event.sequence, event.token.id if event.token else None, event.finish) for event in events
    )


def new_position() -> StreamPosition:
    """Return the position of a request that has no answer yet."""
    return StreamPosition(uuid.uuid4().hex, int(time.time()), resolve_seed(RANDOM_SEED))


def read_position(scope: Mapping[str, Any]) -> StreamPosition | None:
    """Return the position that a scope carries, or None if the stream cannot be continued."""
    values = scope.get(POSITION_KEY)
    return StreamPosition(**values) if values else None
