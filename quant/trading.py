"""A mix put to the test: bytes are moved between one role's tensors and all others, and what lowers
the true divergence on text that nothing was measured on is kept.

Losses that were measured one tensor at a time add up only nearly. Taking a role (attn_v, ffn_down,
the head) for twice or half as sensitive moves bytes to it or from it at the same size of the file;
the divergence of the whole mix decides.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quant import recipe
from quant.allocate import Allocation, Budget, Menu, few, weighed
from quant.sensitivity import F64

FACTORS = (2.0, 0.5)
SURE = 1.0  # standard errors of the paired difference that a change must win by


@dataclass(frozen=True, slots=True)
class Trial:
    """One mix that was read by: `role` was taken for `factor` times as sensitive; the first has
    none.
    """

    role: str
    factor: float
    kld: float
    kept: bool


class Trades:
    """Trials of one menu under one budget, at most `most` of them after the first. `judge` gives
    the divergences of a mix at the held-out positions.
    """

    def __init__(
        self, menu: Menu, budget: Budget, judge: Callable[[Mapping[str, str]], F64], most: int
    ) -> None:
        self.menu, self.budget, self.judge, self.most = menu, budget, judge, most
        self.trials: list[Trial] = []

    def run(self, start: Allocation) -> Iterator[Allocation]:
        """The best mix so far, after each trial."""
        best, found = start, self.judge(start.mix)
        self.trials.append(Trial("", 1.0, float(found.mean()), True))
        yield best
        factors: dict[str, float] = dict.fromkeys(self.menu, 1.0)
        seen = {_key(best)}
        for role, names in self._roles(start):
            for factor in FACTORS:
                changed = factors | {name: factors[name] * factor for name in names}
                other = self._truly(few(weighed(self.menu, changed), self.budget))
                if len(self.trials) > self.most or _key(other) in seen:
                    continue
                seen.add(_key(other))
                apart = self.judge(other.mix)
                better = _better(apart, found)
                self.trials.append(Trial(role, factor, float(apart.mean()), better))
                if better:
                    best, found, factors = other, apart, changed
                yield best
                if better:
                    break

    def _roles(self, start: Allocation) -> list[tuple[str, list[str]]]:
        """Roles with their tensors, those that cost most first."""
        groups: dict[str, list[str]] = {}
        for name in self.menu:
            groups.setdefault(recipe.role(name), []).append(name)
        return sorted(
            groups.items(), key=lambda group: -sum(start.picks[name].loss for name in group[1])
        )

    def _truly(self, found: Allocation) -> Allocation:
        """The same types with the losses that were measured."""
        named = {name: {one.type: one for one in options} for name, options in self.menu.items()}
        return Allocation({name: named[name][pick.type] for name, pick in found.picks.items()})


def _key(allocation: Allocation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(allocation.mix.items()))


def _better(apart: F64, found: F64) -> bool:
    """Whether the difference, position by position, is lower by more than its standard error."""
    change = apart - found
    error = float(change.std()) / np.sqrt(max(len(change) - 1, 1))
    return bool(change.mean() < -SURE * error)
