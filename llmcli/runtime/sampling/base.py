"""The interface of sampler steps, such as top-k. A step is a frozen dataclass whose fields are its
settings. Calling a step maps logits to new logits.

A field made by `setting()` becomes a flag, a `/set` name, a TOML key and a JSON field. A new step
is one new file in this folder. Each step is written in numpy; its method `native` names the
llama.cpp samplers that compute the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.vocabulary import Vocabulary

Logits = NDArray[np.float32]
# the name of a llama_sampler_init_* function, and those of its arguments that the step knows
NativeStep = tuple[str, tuple[Any, ...]]
ApplyStep = Callable[[Logits, list[int]], Logits]  # logits and the tokens so far -> new logits
# Draws a token id from logits. The draw may depend on earlier draws of the same picker.
TokenPicker = Callable[[Logits, np.random.Generator], int]

# Value of a window of recent tokens that includes all tokens of the context.
WHOLE_CONTEXT = -1
# The window of llama.cpp's samplers for WHOLE_CONTEXT, in tokens. They allocate 4 bytes for each.
MAX_WINDOW = 1_000_000
MAX_SHOWN_CHARACTERS = 100  # of a wrong value in an error message
# A token less likely than this share of the likeliest token's probability counts as impossible.
# Steps that count tokens or take the logarithm of a probability drop such tokens first, because
# llama.cpp removes them and 0 · log 0 is NaN.
NEGLIGIBLE_SHARE = 1e-37


@runtime_checkable
class AdaptivePicker(Protocol):
    """A token picker whose draws depend on earlier ones (Mirostat). It has one method for the work
    before a draw and one for the work after it, so that speculative sampling can make the draw
    itself.
    """

    def truncate(self, logits: Logits) -> Logits:
        """Return the logits from which the next token is to be drawn. Dropped tokens have -inf.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """
        ...

    def record_draw(self, kept_logits: Logits, token: int) -> None:
        """Update the picker after `token` was drawn from `kept_logits`, a result of `truncate`."""
        ...


def recent_tokens(tokens: list[int], count: int) -> list[int]:
    """Return the last `count` tokens, or all tokens if `count` is WHOLE_CONTEXT."""
    if count == WHOLE_CONTEXT:
        return tokens
    return tokens[-count:] if count else []


class SettingValues(Protocol):
    """The allowed values of a setting. `metavar`: the placeholder for a value in help texts.
    `is_list`: whether a flag may be repeated, which makes a list of values.
    """

    metavar: ClassVar[str]
    is_list: ClassVar[bool]

    def parse(self, name: str, value: Any, kind: type) -> Any:
        """Return a user's value as `kind`. `name`: the name of the setting, for errors.

        Raises UserError when the value is not allowed.
        """
        ...

    def format_value(self, value: Any) -> str:
        """Return a value as text that `parse` accepts."""
        ...


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """The numbers from `low` to `high`, both included. `open_low` excludes `low` itself."""

    low: float
    high: float
    open_low: bool = False
    metavar: ClassVar[str] = "N"
    is_list: ClassVar[bool] = False

    def parse(self, name: str, value: Any, kind: type) -> Any:
        """Return `value`, a number or its text, as `kind`, which is int or float.

        Raises UserError when it is not such a number or is outside the limits.
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
                f"{name} is {repr(value)[:MAX_SHOWN_CHARACTERS]}",
                hint=f"{name} takes {expected} {self}",
            ) from None
        self.check(name, number)
        return number

    def check(self, name: str, value: float) -> None:
        """Raise UserError when `value` is outside the limits or NaN. `name`: the setting's name."""
        is_inside = self.low <= value <= self.high and not (self.open_low and value == self.low)
        if not is_inside:
            flag = name.replace("_", "-")
            raise UserError(
                f"{name} must be {self}, not {_format_number(value)}",
                hint=f"--{flag} takes a number {self}",
            )

    def format_value(self, value: float) -> str:
        return f"{value:.10g}"

    def __str__(self) -> str:
        """Return the limits in words, such as "from 0 to 1"."""
        low, high = _format_number(self.low), _format_number(self.high)
        return f"above {low}, at most {high}" if self.open_low else f"from {low} to {high}"


def _format_number(number: float) -> str:
    """Return a number as text. Whole numbers have no exponent: 4294967295, not 4.29497e+09."""
    return str(int(number)) if number == number // 1 else f"{number:g}"


def setting(
    default: Any, help: str, limits: SettingValues, *flags: str, aliases: tuple[str, ...] = ()
) -> Any:
    """Return the dataclass field of a step that defines a setting. `limits`: the allowed values.
    `flags`: command-line spellings besides --name. `aliases`: the setting's names in other tools,
    which /set also accepts.
    """
    return field(
        default=default,
        metadata={"help": help, "limits": limits, "flags": flags, "aliases": aliases},
    )


class SamplerStep(ABC):
    """The base class of sampler steps. A step is a frozen dataclass of its settings.

    - `order`: steps run in ascending order. It is llama.cpp's default order: bias, penalties, DRY,
      top-k, typical, top-p, min-p, XTC, temperature.
    - `can_reorder`: the step may change which token is the likeliest. Only these steps run at
      temperature 0, which takes the likeliest token.
    - `needs_all_steps`: at temperature 0, too, the result depends on the steps before this one.
    - `off_values`: values of its settings with which the step changes nothing.
    - `order_names`: names of the step in llama-server's field `samplers`.
    """

    __slots__ = ()
    name: ClassVar[str]
    order: ClassVar[int]
    can_reorder: ClassVar[bool] = False
    needs_all_steps: ClassVar[bool] = False
    off_values: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    order_names: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def is_neutral(self) -> bool:
        """Return whether the values of the settings leave all logits unchanged."""

    @property
    def probability(self) -> float:
        """Return the probability with which the chain applies the step. The chain decides at random
        for each token.
        """
        return 1.0

    @abstractmethod
    def __call__(self, logits: Logits, tokens: list[int]) -> Logits:
        """Return new logits for the token that follows `tokens` (prompt and answer so far). Tokens
        that the step drops get -inf; at least one token is not dropped.

        Shapes: logits `[n_vocab]`, result `[n_vocab]`.
        """

    def bind(self, vocabulary: Vocabulary) -> ApplyStep:
        """Return a function that applies this step with a model's vocabulary. This is the step
        itself for most steps, which need no texts of tokens.
        """
        return self

    def native(self) -> tuple[NativeStep, ...] | None:
        """Return the llama.cpp samplers that compute the same as this step. Return None when there
        are none; the whole chain then runs in numpy.
        """
        return None


class SelectorStep(SamplerStep):
    """The last step of a chain, which also draws the token. Its draws depend on earlier ones, so
    each sequence needs its own picker.
    """

    __slots__ = ()

    @abstractmethod
    def preceding_steps(self, steps: Sequence[SamplerStep]) -> list[SamplerStep]:
        """Return the steps that run before this one, chosen from `steps` and possibly changed."""

    @abstractmethod
    def start(self) -> TokenPicker:
        """Return a new picker for the tokens of one sequence. It remembers its earlier draws."""
