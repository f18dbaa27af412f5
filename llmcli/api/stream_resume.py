"""The position of streamed answers: the data with which another model continues an interrupted
stream.

The front server (front.py) gives each request a name, a time and a seed, and sends them with the
request. Each piece of a stream comes with the marks of its events: the number of the answer, the
token and the finish reason. The front server collects them as the position.

To continue the stream, another model replays the request. It draws again each token that was
already sent, but uses the sent token instead of the drawn one (`Request.replays`), so that random
numbers, penalties and grammars reach the same state. It sends only the events after that. So the
text that the client already has remains the beginning of its answer. Each answer of a stream
continues independently, because events may arrive in another order. An answer that has ended is not
continued, even if the new model's logits would continue it (logits depend slightly on other rows of
the same pass).

Replayed tokens are drawn one by one instead of being processed like a prompt, because the state of
a sampling chain depends on every row of logits. So the replay takes about as long as the text took.
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

POSITION_KEY = "llmcli.known"  # key of the position in an ASGI scope
MARKS_KEY = "llmcli.told"  # key of the marks in an ASGI message
# One event as plain values that can be sent to another process: number of the answer, token id,
# finish reason.
StreamMark = tuple[int, int | None, Finish | None]


@dataclass(slots=True)
class StreamPosition:
    """The position of a request's answers.

    `name`: hexadecimal digits of a UUID; `created`: Unix time in seconds; `seed`: the seed if the
    request sets none. `tokens`: the token ids that were sent, by number of the answer; an empty
    list if an answer has begun without a token. `ends`: the finish reasons, by number of the
    answer.
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
        """Return the tokens of one answer that were already sent, and its finish reason, as a
        replay.
        """
        return ReplayedAnswer(tuple(self.tokens.get(number, ())), self.ends.get(number))

    def attach_to(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of an ASGI scope with this position as plain values."""
        return {**scope, POSITION_KEY: asdict(self)}


class PastAnswer:
    """Recognizes the events of a stream that were already sent before the interruption.
    `has_started`: whether any answer had begun.
    """

    def __init__(self, position: StreamPosition | None) -> None:
        self._left = (
            {number: len(tokens) for number, tokens in position.tokens.items()} if position else {}
        )
        self._ends = position.ends if position else {}
        self.has_started = bool(self._left)

    def includes(self, event: Event) -> bool:
        """Return whether this event was already sent. Call it exactly once for each event."""
        if event.token is None:
            return event.finish is not None and event.sequence in self._ends
        remaining = self._left.get(event.sequence, 0)
        self._left[event.sequence] = remaining - 1
        return remaining > 0


def stream_marks(events: Iterable[Event]) -> tuple[StreamMark, ...]:
    """Return the marks of events: number of the answer, token id, finish reason."""
    return tuple(
        (event.sequence, event.token.id if event.token else None, event.finish) for event in events
    )


def new_position() -> StreamPosition:
    """Return the position for a request without any answer, with a new name and seed."""
    return StreamPosition(uuid.uuid4().hex, int(time.time()), resolve_seed(RANDOM_SEED))


def read_position(scope: Mapping[str, Any]) -> StreamPosition | None:
    """Return the position in an ASGI scope, or None if it contains none."""
    values = scope.get(POSITION_KEY)
    return StreamPosition(**values) if values else None
