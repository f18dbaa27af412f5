"""Sampling settings as one frozen value, assembled from the steps of this folder.

A setting has one spelling everywhere (`min_p`): flag --min-p, `/set min_p`, TOML key, JSON field.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.sampling.base import Limits, Step, Values
from quant.registry import collect

RANDOM = -1  # a new seed for every answer
SEEDS = 2**32
SEED = Limits(RANDOM, SEEDS - 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as users see it. `flags`: further spellings on the command line. `aliases`:
    further spellings in /set.
    """

    name: str
    kind: type
    default: Any
    help: str
    limits: Values
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def parse(self, value: Any) -> Any:
        """Check and convert a value given by a user.

        Raises UserError naming the setting.
        """
        return self.limits.parse(self.name, value, self.kind)

    def show(self, value: Any) -> str:
        """Return a value as people write it."""
        return self.limits.show(value)


@functools.cache
def step_types() -> tuple[Any, ...]:
    """Return the step classes in the order in which they run."""
    return tuple(
        sorted(collect("llmcli.runtime.sampling", "STEPS").values(), key=lambda step: step.order)
    )


@functools.cache
def settings() -> dict[str, Setting]:
    """Return every sampling setting by name, the seed last."""
    table = {
        f.name: _setting(f.name, f.default, f.metadata)
        for step in step_types()
        for f in fields(step)
    }
    table["seed"] = Setting(
        "seed", int, RANDOM, "random seed, -1 = a new one for each answer", SEED, ("-s",)
    )
    return table


def _setting(name: str, default: Any, metadata: Mapping[str, Any]) -> Setting:
    return Setting(name, type(default), default, **metadata)


@dataclass(frozen=True, slots=True)
class Sampling:
    """All sampling settings: one value per step, and the seed."""

    steps: tuple[Step, ...]
    seed: int = RANDOM

    def __getitem__(self, name: str) -> Any:
        """Return the value of one setting."""
        return self._values()[name]

    def as_dict(self) -> dict[str, Any]:
        """Return every setting and its value, in chain order, as JSON and TOML take them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._values().items()
        }

    def _values(self) -> dict[str, Any]:
        values = {f.name: getattr(step, f.name) for step in self.steps for f in fields(step)}  # type: ignore[arg-type]
        return {**values, "seed": self.seed}

    def with_values(self, values: Mapping[str, object]) -> "Sampling":
        """Return a copy with some settings changed.

        Raises UserError for an unknown name or a value out of range.
        """
        parsed = {
            setting.name: setting.parse(value)
            for setting, value in ((find(n), v) for n, v in values.items())
        }
        steps = tuple(
            replace(step, **{f.name: parsed[f.name] for f in fields(step) if f.name in parsed})  # type: ignore[type-var,arg-type]
            for step in self.steps
        )
        return Sampling(steps, int(parsed.get("seed", self.seed)))

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always taken."""
        return bool(self["temp"] == 0)


def defaults() -> Sampling:
    """Return llama.cpp's default settings."""
    return Sampling(tuple(step() for step in step_types()))


def find(name: str) -> Setting:
    """Return the setting with that name or alias.

    Raises UserError naming the nearest setting.
    """
    wanted = name.strip().lower().replace("-", "_")
    for setting in settings().values():
        if wanted == setting.name or wanted in setting.aliases:
            return setting
    near = get_close_matches(wanted, settings(), 1)
    names = ", ".join(settings())
    raise UserError(
        f"no setting called {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"the settings are: {names}",
    )
