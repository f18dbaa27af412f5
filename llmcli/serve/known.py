"""What is known of an answer that is being streamed, so that another model can go on with it where one is lost.

The front (front.py) gives each request a name, a time and a seed and hands them on with it. With each piece of a stream
comes back, beside the bytes, what they tell: how many events, and which tokens. Whoever is asked next draws each of
those tokens again and takes the known one whatever it drew (`Request.known`), so that the stream of chances, penalties
and grammars stand where they stood; it tells what comes behind them. So what a client has read stays the beginning of
its answer, and the rest is drawn as if nothing had happened. Of several answers in one stream nothing is known.

2026-11-22: one of two Ray replicas killed under load left 2 of 60 requests with an error event; with this none. Tokens
are drawn again one by one and not read as a prompt is: what a chain remembers follows from every row of logits. So the
pause is about as long as the text took.
"""

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmcli.runtime.sampling import RANDOM
from llmcli.runtime.sampling.chain import concrete_seed

SCOPE = "llmcli.known"  # in a scope: what is known
TOLD = "llmcli.told"  # in a message: events and tokens that its bytes tell


@dataclass(frozen=True, slots=True)
class Known:
    """An answer's name (a UUID's digits), when it was asked for (Unix seconds), a seed where the request has none, and
    of what was told: the tokens, and the number of events."""

    name: str
    created: int
    seed: int
    tokens: tuple[int, ...] = ()
    events: int = 0

    def more(self, events: int, tokens: Iterable[int]) -> "Known":
        """The same, further on."""
        return replace(self, events=self.events + events, tokens=(*self.tokens, *tokens))

    def put(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """A scope that carries it, as values that travel."""
        return {**scope, SCOPE: asdict(self)}


def fresh() -> Known:
    """Of an answer that nobody has begun."""
    return Known(uuid.uuid4().hex, int(time.time()), concrete_seed(RANDOM))


def known(scope: Mapping[str, Any]) -> Known | None:
    """What a scope carries; None where nobody could go on."""
    found = scope.get(SCOPE)
    return Known(**found) if found else None
