"""What a sampler step is: a frozen value whose fields are its settings, and a pure function on logits.

A step's fields become flags, `/set` names, TOML keys and JSON fields through `setting()`; adding a step is
one new file in this folder. The numpy form is the truth; `native` names llama.cpp's own sampler for it.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError

Logits = NDArray[np.float32]
Native = tuple[str, tuple[float, ...]]  # a llama_sampler_init_* name and its arguments


@dataclass(frozen=True, slots=True)
class Limits:
    """The values a setting may have, both ends included unless said otherwise."""

    low: float
    high: float
    open_low: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise UserError when `value` is outside (or not a number)."""
        inside = self.low <= value <= self.high and not (self.open_low and value == self.low)
        if not inside:
            flag = name.replace("_", "-")
            raise UserError(f"{name} must be {self}, not {_plain(value)}", hint=f"--{flag} takes a number {self}")

    def __str__(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        return f"above {low}, at most {high}" if self.open_low else f"from {low} to {high}"


def _plain(number: float) -> str:
    """A number as people write it: 4294967295, not 4.29497e+09."""
    return str(int(number)) if number == number // 1 else f"{number:g}"


def setting(default: float | int, help: str, limits: Limits, *flags: str, aliases: tuple[str, ...] = ()) -> Any:
    """A field of a step. `flags` are short spellings beside --name, `aliases` other tools' names for /set."""
    return field(default=default, metadata={"help": help, "limits": limits, "flags": flags, "aliases": aliases})


class Step(Protocol):
    """One step of the chain.

    `order` follows llama.cpp's default: penalties, top-k, typical, top-p, min-p, temperature. `reorders`:
    another token may become the likeliest, so that the step counts even where the likeliest is always taken.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    reorders: ClassVar[bool]

    @property
    def neutral(self) -> bool:
        """Whether these settings change nothing."""
        ...

    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        """New logits [n_vocab]; a dropped token is -inf; at least one token stays."""
        ...

    def native(self) -> Native | None:
        """llama.cpp's sampler of the same meaning; None where it has none, and the chain runs in numpy."""
        ...
