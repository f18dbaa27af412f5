"""All sampling settings as one frozen value, assembled from the steps in this folder.

A setting has the same name everywhere. Example `min_p`: flag --min-p, `/set min_p`, TOML key, JSON
field.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.sampling.base import NumberLimits, SamplerStep, SettingValues
from quant.registry import collect

RANDOM_SEED = -1  # a seed value that asks for a new seed for every answer
N_SEEDS = 2**32
SEED_LIMITS = NumberLimits(RANDOM_SEED, N_SEEDS - 1)


@dataclass(frozen=True, slots=True)
class SamplingSetting:
    """One setting as users see it. `flags`: additional spellings on the command line. `aliases`:
    additional names in /set.
    """

    name: str
    kind: type
    default: Any
    help: str
    limits: SettingValues
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def parse(self, value: Any) -> Any:
        """Check and convert a value given by a user.

        Raises UserError naming the setting.
        """
        return self.limits.parse(self.name, value, self.kind)

    def format_value(self, value: Any) -> str:
        """Return a value as users write it."""
        return self.limits.format_value(value)


@functools.cache
def step_types() -> tuple[Any, ...]:
    """Return the step classes in the order in which they run."""
    return tuple(
        sorted(collect("llmcli.runtime.sampling", "STEPS").values(), key=lambda step: step.order)
    )


@functools.cache
def sampling_settings() -> dict[str, SamplingSetting]:
    """Return every sampling setting by name, the seed last."""
    table = {
        f.name: _setting(f.name, f.default, f.metadata)
        for step in step_types()
        for f in fields(step)
    }
    table["seed"] = SamplingSetting(
        "seed",
        int,
        RANDOM_SEED,
        "random seed, -1 = a new one for each answer",
        SEED_LIMITS,
        ("-s",),
    )
    return table


def _setting(name: str, default: Any, metadata: Mapping[str, Any]) -> SamplingSetting:
    return SamplingSetting(name, type(default), default, **metadata)


@dataclass(frozen=True, slots=True)
class Sampling:
    """All sampling settings: one value per step, and the seed."""

    steps: tuple[SamplerStep, ...]
    seed: int = RANDOM_SEED

    def __getitem__(self, name: str) -> Any:
        """Return the value of one setting."""
        return self._values()[name]

    def as_dict(self) -> dict[str, Any]:
        """Return every setting and its value, in the order of the chain, in types that JSON and
        TOML support.
        """
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
            for setting, value in ((find_setting(n), v) for n, v in values.items())
        }
        steps = tuple(
            replace(step, **{f.name: parsed[f.name] for f in fields(step) if f.name in parsed})  # type: ignore[type-var,arg-type]
            for step in self.steps
        )
        return Sampling(steps, int(parsed.get("seed", self.seed)))

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is always taken."""
        return bool(self["temp"] == 0)


def default_sampling() -> Sampling:
    """Return llama.cpp's default settings."""
    return Sampling(tuple(step() for step in step_types()))


def find_setting(name: str) -> SamplingSetting:
    """Return the setting with that name or alias.

    Raises UserError naming the nearest setting.
    """
    wanted = name.strip().lower().replace("-", "_")
    for setting in sampling_settings().values():
        if wanted == setting.name or wanted in setting.aliases:
            return setting
    near = get_close_matches(wanted, sampling_settings(), 1)
    names = ", ".join(sampling_settings())
    raise UserError(
        f"no setting called {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"the settings are: {names}",
    )
