"""What a sampler step is: a frozen value whose fields are its settings, and a pure function on
logits.

A step's fields become flags, `/set` names, TOML keys and JSON fields through `setting()`. A new
step is one new file in this folder. The numpy form is the reference; `native` names llama.cpp's
samplers for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.vocabulary import Vocabulary

Logits = NDArray[np.float32]
NativeStep = tuple[
    str, tuple[Any, ...]
]  # a llama_sampler_init_* name and the arguments that a step can give
ApplyStep = Callable[[Logits, list[int]], Logits]  # logits and the tokens so far -> new logits
# draws one token; it may depend on what it drew before
PickToken = Callable[[Logits, np.random.Generator], int]

# llama.cpp drops candidates, llmcli writes -inf. Before candidates are counted, or logarithms of
# probabilities taken (0 · log 0 is NaN), both drop what is less likely than this share of the
# likeliest token.
NEGLIGIBLE_SHARE = 1e-37


@runtime_checkable
class LearningPick(Protocol):
    """A draw that depends on earlier draws, split in two."""

    def truncate(self, logits: Logits) -> Logits:
        """Return the logits that it would draw from."""
        ...

    def learn(self, kept: Logits, token: int) -> None:
        """Record that `token` was drawn from `kept`."""
        ...


class SettingValues(Protocol):
    """The values that a setting may have."""

    metavar: ClassVar[str]
    is_list: ClassVar[bool]

    def parse(self, name: str, value: Any, kind: type) -> Any:
        """Check and convert a value given by a user.

        Raises UserError naming the setting.
        """
        ...

    def format_value(self, value: Any) -> str:
        """Return a value as people write it."""
        ...


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """Numbers between two limits, which are included unless `open_low` excludes the lower one."""

    low: float
    high: float
    open_low: bool = False
    metavar: ClassVar[str] = "N"
    is_list: ClassVar[bool] = False

    def parse(self, name: str, value: Any, kind: type) -> Any:
        """Return `value` as `kind`, an int or a float.

        Raises UserError naming the setting.
        """
        try:
            number = kind(value)
            if isinstance(value, bool) or (
                isinstance(value, float) and number != value and number == number
            ):
                raise ValueError(value)  # 4.7 is not a whole number, and true is not a number
        except (TypeError, ValueError, OverflowError):
            expected = "a whole number" if kind is int else "a number"
            raise UserError(
                f"{name} is {value!r}", hint=f"{name} takes {expected} {self}"
            ) from None
        self.check(name, number)
        return number

    def check(self, name: str, value: float) -> None:
        """Raise UserError when `value` is outside the limits or not a number."""
        inside = self.low <= value <= self.high and not (self.open_low and value == self.low)
        if not inside:
            flag = name.replace("_", "-")
            raise UserError(
                f"{name} must be {self}, not {_plain(value)}",
                hint=f"--{flag} takes a number {self}",
            )

    def format_value(self, value: float) -> str:
        return f"{value:.10g}"

    def __str__(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        return f"above {low}, at most {high}" if self.open_low else f"from {low} to {high}"


def _plain(number: float) -> str:
    """Return a number as people write it: 4294967295, not 4.29497e+09."""
    return str(int(number)) if number == number // 1 else f"{number:g}"


def setting(
    default: Any, help: str, limits: SettingValues, *flags: str, aliases: tuple[str, ...] = ()
) -> Any:
    """Return a dataclass field for a setting of a step. `flags`: further spellings besides --name.
    `aliases`: other tools' names, for /set.
    """
    return field(
        default=default,
        metadata={"help": help, "limits": limits, "flags": flags, "aliases": aliases},
    )


class SamplerStep(ABC):
    """One step of the chain: a frozen dataclass of its settings.

    `order` follows llama.cpp's default: bias, penalties, DRY, top-k, typical, top-p, min-p, XTC,
    temperature. `can_reorder`: the step may change which token is the likeliest, so it applies even
    at temperature 0, where the likeliest is always taken.
    """

    __slots__ = ()
    name: ClassVar[str]
    order: ClassVar[int]
    can_reorder: ClassVar[bool] = False

    @property
    @abstractmethod
    def is_neutral(self) -> bool:
        """Return whether these settings have no effect."""

    @property
    def probability(self) -> float:
        """Return the probability that the step applies; decided separately for each token."""
        return 1.0

    @abstractmethod
    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        """Return new logits; a dropped token is -inf, and at least one token stays.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """

    def bind(self, vocabulary: Vocabulary) -> ApplyStep:
        """Return this step for one vocabulary; most steps do not need it."""
        return self

    def native(self) -> tuple[NativeStep, ...] | None:
        """Return llama.cpp's equivalent samplers, or None when there are none and the chain runs in
        numpy.
        """
        return None


class SelectorStep(SamplerStep):
    """A last step that draws the token itself and depends on earlier draws."""

    __slots__ = ()

    @abstractmethod
    def preceding_steps(self, steps: Sequence[SamplerStep]) -> list[SamplerStep]:
        """Return the steps that run before this one."""

    @abstractmethod
    def start(self) -> PickToken:
        """Return the draw of one sequence, with its own memory."""
