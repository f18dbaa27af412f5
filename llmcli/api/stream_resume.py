"""Lets another model process continue a client's stream if the first process was lost.

The front server (serve/processes/front.py) gives each request a name, a creation time and a seed.
While a stream runs, it collects the tokens and finish reasons that the client has received. It
holds all of this in a StreamPosition. If the model process is lost, it sends the request and the
position to another process.

That process replays the request. At each position that the client already has, it samples a token
as usual but replaces it by the recorded token (`Request.replays`), so that random numbers,
penalties and grammars reach the same state. It sends only the events after the recorded tokens, so
the client's text stays valid. Each of the request's answers is replayed separately, because their
events may arrive interleaved. An answer that has ended stays ended, even if the new process would
continue it: logits depend slightly on the other sequences of a batch.

Recorded tokens are sampled one by one instead of being processed like a prompt, because the
sampler's state depends on the logits of each position. So the replay takes about as long as the
generation took.
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

POSITION_KEY = "llmcli.position"  # key of a StreamPosition in an ASGI scope
MARKS_KEY = "llmcli.marks"  # key of the StreamMarks in an ASGI message
# An event of a stream as plain values for another process: the number of the answer
# (`Event.sequence`), the token id, and the finish reason.
StreamMark = tuple[int, int | None, Finish | None]


@dataclass(slots=True)
class StreamPosition:
    """What the client has received of a request's answers. A StreamMark's first value, the number
    of the answer, is the key of `tokens` and `ends`.

    - `name`: hexadecimal digits of a UUID, used in the ids of the response.
    - `created`: the Unix time of the request in seconds.
    - `seed`: the sampling seed if the request sets none.
    - `tokens`: the sent token ids of each answer; an empty list if an answer has begun without a
      token.
    - `ends`: the finish reason of each answer that has ended.
    """

    name: str
    created: int
    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finish] = field(default_factory=dict)

    def advance(self, marks: Iterable[StreamMark]) -> None:
        """Add the tokens and finish reasons of events that were sent to the client."""
        for number, token, finish in marks:
            tokens = self.tokens.setdefault(number, [])
            if token is not None:
                tokens.append(token)
            if finish is not None:
                self.ends[number] = finish

    def replayed_answer(self, number: int) -> ReplayedAnswer:
        """Return the tokens and the finish reason that the client has received of one answer. The
        engine replays them (`Request.replays`).
        """
        return ReplayedAnswer(tuple(self.tokens.get(number, ())), self.ends.get(number))

    def attach_to(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of an ASGI scope that also contains this position, as plain values for
        another process.
        """
        return {**scope, POSITION_KEY: asdict(self)}


class PastAnswer:
    """Recognizes the events that the client already received before the interruption, so that a
    resumed stream skips them. Without a position, no event is skipped. `has_started`: whether the
    client has received the beginning of any answer.
    """

    def __init__(self, position: StreamPosition | None) -> None:
        self._remaining = (
            {number: len(tokens) for number, tokens in position.tokens.items()} if position else {}
        )
        self._ends = position.ends if position else {}
        self.has_started = bool(self._remaining)

    def includes(self, event: Event) -> bool:
        """Return whether the client already received this event. Call it exactly once for each
        event, in order, because it counts the tokens of each answer.
        """
        if event.token is None:
            return event.finish is not None and event.sequence in self._ends
        remaining = self._remaining.get(event.sequence, 0)
        self._remaining[event.sequence] = remaining - 1
        return remaining > 0


def stream_marks(events: Iterable[Event]) -> tuple[StreamMark, ...]:
    """Return the StreamMark of each event."""
    return tuple(
        (event.sequence, event.token.id if event.token else None, event.finish) for event in events
    )


def new_position() -> StreamPosition:
    """Return the position of a new request, before any answer, with a random name and seed."""
    return StreamPosition(uuid.uuid4().hex, int(time.time()), resolve_seed(RANDOM_SEED))


def read_position(scope: Mapping[str, Any]) -> StreamPosition | None:
    """Return the position in an ASGI scope, or None if the request does not resume a stream."""
    values = scope.get(POSITION_KEY)
    return StreamPosition(**values) if values else None
