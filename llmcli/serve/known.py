"""What is known of the answers that are being streamed, so that another model can go on where one
is lost.

The front (front.py) gives each request a name, a time and a seed and hands them on with it. With
each piece of a stream comes back, beside the bytes, what they tell: of which answer, which token,
and whether it has ended. Whoever is asked next draws each of those tokens again and takes the known
one whatever it drew (`Request.known`), so that the stream of chances, penalties and grammars stand
where they stood; it tells what comes behind them. So what a client has read stays the beginning of
its answers, and the rest is drawn as if nothing had happened. Of several answers in one stream each
goes on by itself: their events may come in another order. One that had ended is not drawn on,
though other logits (of other rows in the same pass) might have it go on.

2026-11-22: one of two Ray replicas killed under load left 2 of 60 requests with an error event;
with this none. Tokens are drawn again one by one and not read as a prompt is: what a chain
remembers follows from every row of logits. So the pause is about as long as the text took.
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmcli.runtime.request import Begun
from llmcli.runtime.sampling import RANDOM
from llmcli.runtime.sampling.chain import concrete_seed
from llmcli.types import Event, Finish

SCOPE = "llmcli.known"  # in a scope: what is known
TOLD = "llmcli.told"  # in a message: what its bytes tell
# An event: of which answer, its token, how the answer ended. As plain values, which travel.
Told = tuple[int, int | None, Finish | None]


@dataclass(slots=True)
class Known:
    """Answers' name (a UUID's digits), when they were asked for (Unix seconds), a seed where the
    request has none, and of what was told, by the answer's number: the tokens, none where it has
    only begun, and the ends.
    """

    name: str
    created: int
    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finish] = field(default_factory=dict)

    def hear(self, told: Iterable[Told]) -> None:
        """More was told."""
        for number, token, finish in told:
            tokens = self.tokens.setdefault(number, [])
            if token is not None:
                tokens.append(token)
            if finish is not None:
                self.ends[number] = finish

    def begun(self, number: int) -> Begun:
        """One answer's beginning."""
        return Begun(tuple(self.tokens.get(number, ())), self.ends.get(number))

    def put(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """A scope that carries it, as values that travel."""
        return {**scope, SCOPE: asdict(self)}


class Past:
    """Of a stream's events those that were told before. `begun`: whether any was."""

    def __init__(self, known: Known | None) -> None:
        self._left = (
            {number: len(tokens) for number, tokens in known.tokens.items()} if known else {}
        )
        self._ends = known.ends if known else {}
        self.begun = bool(self._left)

    def has(self, event: Event) -> bool:
        """Whether this is one; asked once for each."""
        if event.token is None:
            return event.finish is not None and event.sequence in self._ends
        left = self._left.get(event.sequence, 0)
        self._left[event.sequence] = left - 1
        return left > 0


def told(events: Iterable[Event]) -> tuple[Told, ...]:
    """What these events tell."""
    return tuple(
        (event.sequence, event.token.id if event.token else None, event.finish) for event in events
    )


def fresh() -> Known:
    """Of answers that nobody has begun."""
    return Known(uuid.uuid4().hex, int(time.time()), concrete_seed(RANDOM))


def known(scope: Mapping[str, Any]) -> Known | None:
    """What a scope carries; None where nobody could go on."""
    found = scope.get(SCOPE)
    return Known(**found) if found else None
