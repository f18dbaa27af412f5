"""What a sampler step is: a frozen value whose fields are its settings, and a pure function on
logits.

A step's fields become flags, `/set` names, TOML keys and JSON fields through `setting()`; adding a
step is one new file in this folder. The numpy form is the truth; `native` names llama.cpp's own
samplers for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError

Logits = NDArray[np.float32]
Native = tuple[
    str, tuple[Any, ...]
]  # a llama_sampler_init_* name and the arguments that a step knows
Apply = Callable[[Logits, list[int]], Logits]  # logits and the tokens so far -> new logits
Pick = Callable[[Logits, np.random.Generator], int]  # draws one token; it may remember what it drew

# llama.cpp drops candidates, we write -inf. Where it counts candidates or takes logarithms of
# probabilities (0 · log 0 is NaN there) both leave out what is less likely than this share of the
# likeliest first.
NOTHING = 1e-37


@runtime_checkable
class Learning(Protocol):
    """A draw that goes by what it drew before, in its two halves."""

    def kept(self, logits: Logits) -> Logits:
        """What it would draw from."""
        ...

    def learn(self, kept: Logits, token: int) -> None:
        """`token` was drawn from that."""
        ...


class Values(Protocol):
    """The values that a setting may have."""

    metavar: ClassVar[str]
    many: ClassVar[bool]

    def parse(self, name: str, value: Any, kind: type) -> Any:
        """A value typed or written by a user, checked; raises UserError naming the setting."""
        ...

    def show(self, value: Any) -> str:
        """A value as people write it."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers between two ends, both included unless said otherwise."""

    low: float
    high: float
    open_low: bool = False
    metavar: ClassVar[str] = "N"
    many: ClassVar[bool] = False

    def parse(self, name: str, value: Any, kind: type) -> Any:
        """`value` as an int or a float, whichever `kind` is."""
        try:
            number = kind(value)
            if isinstance(value, bool) or (
                isinstance(value, float) and number != value and number == number
            ):
                raise ValueError(value)  # 4.7 is no whole number, and true no number
        except (TypeError, ValueError, OverflowError):
            what = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} is {value!r}", hint=f"{name} takes {what} {self}") from None
        self.check(name, number)
        return number

    def check(self, name: str, value: float) -> None:
        """Raise UserError when `value` is outside (or not a number)."""
        inside = self.low <= value <= self.high and not (self.open_low and value == self.low)
        if not inside:
            flag = name.replace("_", "-")
            raise UserError(
                f"{name} must be {self}, not {_plain(value)}",
                hint=f"--{flag} takes a number {self}",
            )

    def show(self, value: float) -> str:
        return f"{value:.10g}"

    def __str__(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        return f"above {low}, at most {high}" if self.open_low else f"from {low} to {high}"


def _plain(number: float) -> str:
    """A number as people write it: 4294967295, not 4.29497e+09."""
    return str(int(number)) if number == number // 1 else f"{number:g}"


def setting(
    default: Any, help: str, limits: Values, *flags: str, aliases: tuple[str, ...] = ()
) -> Any:
    """A field of a step. `flags` are further spellings beside --name, `aliases` other tools' names
    for /set.
    """
    return field(
        default=default,
        metadata={"help": help, "limits": limits, "flags": flags, "aliases": aliases},
    )


class Words(Protocol):
    """What a step may ask of a vocabulary."""

    @property
    def size(self) -> int: ...

    @property
    def piece(self) -> Callable[[int], bytes]: ...


class Step(ABC):
    """One step of the chain: a frozen dataclass of its settings.

    `order` follows llama.cpp's default: bias, penalties, DRY, top-k, typical, top-p, min-p, XTC,
    temperature. `reorders`: another token may become the likeliest, so that the step counts even at
    temperature 0, where the likeliest is always taken.
    """

    __slots__ = ()
    name: ClassVar[str]
    order: ClassVar[int]
    reorders: ClassVar[bool] = False

    @property
    @abstractmethod
    def neutral(self) -> bool:
        """Whether these settings change nothing."""

    @property
    def chance(self) -> float:
        """How often the step is taken at all; a coin is thrown for each token."""
        return 1.0

    @abstractmethod
    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        """New logits [n_vocab]; a dropped token is -inf; at least one token stays."""

    def bound(self, words: Words) -> Apply:
        """This step for one vocabulary; most need nothing of it."""
        return self

    def native(self) -> tuple[Native, ...] | None:
        """llama.cpp's samplers of the same meaning; None where it has none, and the chain runs in
        numpy.
        """
        return None


class Selector(Step):
    """A last step that draws the token itself and remembers what it drew."""

    __slots__ = ()

    @abstractmethod
    def before(self, steps: Sequence[Step]) -> list[Step]:
        """What of the other steps still runs in front of it."""

    @abstractmethod
    def start(self) -> Pick:
        """The draw of one sequence, with a memory of its own."""
