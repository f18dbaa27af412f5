"""Refinement of a mix: bytes are moved between one role's tensors and all others, and a change is
kept if it lowers the divergence on held-out text.

Losses that were measured for single tensors add up only approximately. Treating a role (attn_v,
ffn_down, the head) as twice or half as sensitive moves bytes to it or from it at the same file
size; the divergence of the whole mix decides.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quant.allocation.allocate import Allocation, Budget, Menu, few, weighed
from quant.allocation.sensitivity import F64
from quant.recipes import tensor_types

FACTORS = (2.0, 0.5)
SURE = 1.0  # standard errors of the paired difference that an improvement must exceed


@dataclass(frozen=True, slots=True)
class Trial:
    """One mix that was measured: `role` was treated as `factor` times as sensitive; the first trial
    has no role.
    """

    role: str
    factor: float
    kld: float
    kept: bool


class Trades:
    """Trials of one menu under one budget, at most `max_trials` after the first. `measure` returns
    the divergences of a mix at the held-out positions.
    """

    def __init__(
        self, menu: Menu, budget: Budget, judge: Callable[[Mapping[str, str]], F64], most: int
    ) -> None:
        self.menu, self.budget, self.judge, self.most = menu, budget, judge, most
        self.trials: list[Trial] = []

    def run(self, start: Allocation) -> Iterator[Allocation]:
        """Yield the best mix so far, after each trial."""
        best, best_klds = start, self.judge(start.mix)
        self.trials.append(Trial("", 1.0, float(best_klds.mean()), True))
        yield best
        factors: dict[str, float] = dict.fromkeys(self.menu, 1.0)
        seen = {_mix_key(best)}
        for role, names in self._roles(start):
            for factor in FACTORS:
                changed = factors | {name: factors[name] * factor for name in names}
                candidate = self._with_measured_losses(
                    few(weighed(self.menu, changed), self.budget)
                )
                if len(self.trials) > self.most or _mix_key(candidate) in seen:
                    continue
                seen.add(_mix_key(candidate))
                klds = self.judge(candidate.mix)
                better = _is_better(klds, best_klds)
                self.trials.append(Trial(role, factor, float(klds.mean()), better))
                if better:
                    best, best_klds, factors = candidate, klds, changed
                yield best
                if better:
                    break

    def _roles(self, start: Allocation) -> list[tuple[str, list[str]]]:
        """Return the roles with their tensors, the role with the largest loss first."""
        groups: dict[str, list[str]] = {}
        for name in self.menu:
            groups.setdefault(tensor_types.role(name), []).append(name)
        return sorted(
            groups.items(), key=lambda group: -sum(start.picks[name].loss for name in group[1])
        )

    def _with_measured_losses(self, found: Allocation) -> Allocation:
        """Return the same types with the measured losses."""
        named = {
            name: {option.type: option for option in options} for name, options in self.menu.items()
        }
        return Allocation({name: named[name][pick.type] for name, pick in found.picks.items()})


def _mix_key(allocation: Allocation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(allocation.mix.items()))


def _is_better(candidate: F64, best: F64) -> bool:
    """Return whether the difference, position by position, is below zero by more than its standard
    error.
    """
    change = candidate - best
    error = float(change.std()) / np.sqrt(max(len(change) - 1, 1))
    return bool(change.mean() < -SURE * error)
