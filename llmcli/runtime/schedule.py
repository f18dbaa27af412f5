"""How passes are shared out when many requests run at once, and how things stand: frozen values."""

from dataclasses import dataclass

from llmcli.errors import UserError


class Crowded(UserError):
    """As many requests wait as may; this one was not taken."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The shares of a pass. None means no limit but the context's own, which is what one
    conversation wants.

    `running`: requests that run at once; sequences beyond them keep what was computed before, for
    whoever begins alike. `rows` a pass may have, tokens of answers before those of prompts;
    `chunk`: rows of one prompt in a pass. `waiting`: requests that may wait; one more is refused
    (Crowded). `gap`: seconds between two tokens of an answer that prompts of others should not
    exceed. `shared`: whether clients share what begins alike; how long an answer takes tells
    whether somebody asked the same before. `swap_bytes`: of answers that gave way in a full pool
    and wait in the host's memory; beyond, they are computed anew. `idle_cells`: that finished
    answers may hold once another begins; what they held beyond lies in the host's memory, too, as
    many bytes again (parking.py says what for). `aside`: rows of prompts from which on they are
    computed in passes of their own, in turn with those of the answers that go on, which step out of
    the pool meanwhile (aside.py). `apart`: rows of one prompt from which on it is read in another
    context (reader.py), in turn with the answers, too.
    """

    running: int | None = None
    rows: int | None = None
    chunk: int | None = None
    waiting: int | None = None
    gap: float | None = None
    shared: bool = True
    swap_bytes: int = 256 << 20
    idle_cells: int | None = None
    aside: int | None = None
    apart: int | None = None

    def __post_init__(self) -> None:
        for name in ("running", "rows", "chunk"):
            limit = getattr(self, name)
            assert limit is None or limit > 0, (name, limit)


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do. `preempted` requests had begun and wait for room; they are among
    the `waiting`. `cells` of `size` hold tokens. `prompt_tokens` were computed and `tokens` drawn
    since it was made, and `preemptions` made.
    """

    running: int
    waiting: int
    preempted: int
    cells: int
    size: int
    prompt_tokens: int
    tokens: int
    preemptions: int
