"""The interface of sampler steps. A step is a frozen value whose fields are its settings, and a
pure function on logits.

`setting()` turns the fields of a step into flags, `/set` names, TOML keys and JSON fields. A new
step is one new file in this folder. The numpy form of a step is the reference; `native` names the
llama.cpp samplers that do the same.
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
]  # the name of a llama_sampler_init_* function, and those of its arguments that the step knows
ApplyStep = Callable[[Logits, list[int]], Logits]  # logits and the tokens so far -> new logits
# draws one token; it may depend on what it drew before
PickToken = Callable[[Logits, np.random.Generator], int]

# llama.cpp drops candidates where llmcli writes -inf. Tokens that are less likely than the
# likeliest token times this share are dropped by both before candidates are counted and before
# logarithms of probabilities are taken (0 · log 0 is NaN).
NEGLIGIBLE_SHARE = 1e-37


@runtime_checkable
class LearningPick(Protocol):
    """A token picker that depends on earlier draws, split into the part before the draw and the
    part after it.
    """

    def truncate(self, logits: Logits) -> Logits:
        """Return the logits from which the next token is to be drawn."""
        ...

    def learn(self, kept: Logits, token: int) -> None:
        """Update the picker after `token` was drawn from `kept`."""
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
        """Return a value as users write it."""
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
                # a fraction such as 4.7 is not a whole number, and true is not a number
                raise ValueError(value)
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
    """Return a number as users write it: 4294967295, not 4.29497e+09."""
    return str(int(number)) if number == number // 1 else f"{number:g}"


def setting(
    default: Any, help: str, limits: SettingValues, *flags: str, aliases: tuple[str, ...] = ()
) -> Any:
    """Return a dataclass field for a setting of a step. `flags`: additional command-line spellings
    besides --name. `aliases`: names of the setting in other tools, which /set accepts.
    """
    return field(
        default=default,
        metadata={"help": help, "limits": limits, "flags": flags, "aliases": aliases},
    )


class SamplerStep(ABC):
    """One step of the chain: a frozen dataclass of its settings.

    `order`: steps run in ascending order, which is llama.cpp's default: bias, penalties, DRY,
    top-k, typical, top-p, min-p, XTC, temperature. `can_reorder`: the step may change which token
    is the likeliest. Such a step applies even at temperature 0, where the likeliest token is always
    taken.
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
        """Return the probability with which the step is applied. This is decided at random for each
        token.
        """
        return 1.0

    @abstractmethod
    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        """Return new logits. A dropped token has the logit -inf, and at least one token is not
        dropped.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """

    def bind(self, vocabulary: Vocabulary) -> ApplyStep:
        """Return a function that applies this step with one vocabulary. Most steps do not depend on
        the vocabulary.
        """
        return self

    def native(self) -> tuple[NativeStep, ...] | None:
        """Return the equivalent samplers of llama.cpp. None means that there are none, so the whole
        chain runs in numpy.
        """
        return None


class SelectorStep(SamplerStep):
    """A step that ends the chain: it draws the token itself, and its draws depend on earlier ones."""

    __slots__ = ()

    @abstractmethod
    def preceding_steps(self, steps: Sequence[SamplerStep]) -> list[SamplerStep]:
        """Return those of `steps` that run before this one."""

    @abstractmethod
    def start(self) -> PickToken:
        """Return a function that draws the tokens of one sequence and remembers its earlier draws."""
