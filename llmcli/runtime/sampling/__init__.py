"""`Sampling`: all settings of the sampler as one frozen value. Each module of this folder defines a
sampler step, and the fields of the step are settings.

A setting has the same name everywhere. For example, `min_p` is the flag --min-p, the chat command
`/set min_p`, a TOML key and a JSON field.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.sampling.base import NumberLimits, SamplerStep, SelectorStep, SettingValues
from quant.registry import collect

RANDOM_SEED = -1  # the value of `seed` that requests a new random seed for every answer
N_SEEDS = 2**32  # seeds are 0 to N_SEEDS - 1, as in llama.cpp
SEED_LIMITS = NumberLimits(RANDOM_SEED, N_SEEDS - 1)
# Samplers of llama-server that change nothing without a setting that llmcli does not have.
INERT_STEP_NAMES = ("adaptive_p", "a")


@dataclass(frozen=True, slots=True)
class SamplingSetting:
    """The description of one setting, from which its flag, its help text and its /set name are
    made.
    """

    name: str
    kind: type  # the Python type of a value
    default: Any
    help: str
    limits: SettingValues  # the allowed values
    flags: tuple[str, ...] = ()  # command-line spellings besides --name
    aliases: tuple[str, ...] = ()  # names in /set besides `name`

    def parse(self, value: Any) -> Any:
        """Return a user's value (text, number or list) as the type of the setting.

        Raises UserError, with the name of the setting, when the value is not allowed.
        """
        return self.limits.parse(self.name, value, self.kind)

    def format_value(self, value: Any) -> str:
        """Return a value as text that `parse` accepts."""
        return self.limits.format_value(value)


@functools.cache
def step_types() -> tuple[Any, ...]:
    """Return the sampler step classes of this folder, in the order in which they run."""
    return tuple(
        sorted(collect("llmcli.runtime.sampling", "STEPS").values(), key=lambda step: step.order)
    )


@functools.cache
def sampling_settings() -> dict[str, SamplingSetting]:
    """Return every sampling setting by name, in the order of the steps, with the seed last."""
    settings = {
        f.name: _setting(f.name, f.default, f.metadata)
        for step in step_types()
        for f in fields(step)
    }
    settings["seed"] = SamplingSetting(
        "seed",
        int,
        RANDOM_SEED,
        "random seed, -1 = a new one for each answer",
        SEED_LIMITS,
        ("-s",),
    )
    return settings


def _setting(name: str, default: Any, metadata: Mapping[str, Any]) -> SamplingSetting:
    """Return the setting of one field of a step. `metadata`: that of the field (base.setting)."""
    return SamplingSetting(name, type(default), default, **metadata)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The values of all sampling settings: one object for each step of the chain, and the seed."""

    steps: tuple[SamplerStep, ...]
    seed: int = RANDOM_SEED

    def __getitem__(self, name: str) -> Any:
        """Return the value of one setting."""
        return self._values()[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the value of every setting by name, in the order of the chain. Tuples become
        lists, because TOML and JSON have no tuples.
        """
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._values().items()
        }

    def _values(self) -> dict[str, Any]:
        """Return the value of every setting by name, in the order of the chain."""
        values = {f.name: getattr(step, f.name) for step in self.steps for f in fields(step)}  # type: ignore[arg-type]
        return {**values, "seed": self.seed}

    def with_values(self, values: Mapping[str, object]) -> "Sampling":
        """Return a copy with the settings in `values` changed. `values`: users' values by setting
        name or alias.

        Raises UserError for an unknown name or a value that is not allowed.
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

    def in_order(self, names: Sequence[str]) -> "Sampling":
        """Return a copy whose steps run in the order of `names`, as in llama-server's field
        `samplers`. A step that is not named changes nothing; bias and Mirostat always remain.

        Raises UserError for an unknown name.
        """
        by_name = {name: step for step in self.steps for name in step.order_names}
        ordered = []
        for name in names:
            key = name.lower().replace("-", "_")
            step = by_name.get(key) or _without_underscores(by_name).get(key)
            if step is None and key not in INERT_STEP_NAMES:
                known = ", ".join(step.name for step in self.steps if step.order_names)
                raise UserError(f"there is no sampler {name[:40]!r}", hint=f"the samplers: {known}")
            ordered += [step] if step else []
        first = [
            step
            for step in self.steps
            if not step.order_names and not isinstance(step, SelectorStep)
        ]
        last = [step for step in self.steps if isinstance(step, SelectorStep)]
        off = [
            replace(step, **step.off_values)  # type: ignore[type-var]
            for step in self.steps
            if step.order_names and step not in ordered
        ]
        return Sampling((*first, *ordered, *off, *last), self.seed)

    @property
    def is_greedy(self) -> bool:
        """Return whether each draw takes the likeliest token, which temperature 0 means."""
        return bool(self["temp"] == 0)


def _without_underscores(steps: Mapping[str, SamplerStep]) -> dict[str, SamplerStep]:
    """Return the steps by the spelling of their names without underscores, such as "topk"."""
    return {name.replace("_", ""): step for name, step in steps.items()}


def default_sampling() -> Sampling:
    """Return the default of every setting; the defaults are llama.cpp's."""
    return Sampling(tuple(step() for step in step_types()))


def find_setting(name: str) -> SamplingSetting:
    """Return the setting whose name or alias is `name`. Upper case, and `-` instead of `_`, are
    allowed.

    Raises UserError, which suggests the most similar name, when there is no such setting.
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
