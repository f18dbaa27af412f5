"""Refinement of a mix: bytes are moved between the tensors of one role and all others, and a change
is kept if it lowers the divergence on held-out text.

Losses that were measured for single tensors add up only approximately. Treating a role (attn_v,
ffn_down, the head) as twice or half as sensitive moves bytes to its tensors or away from them at
the same file size. The divergence of the whole mix decides whether the change is kept.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quant.allocation.allocate import Allocation, Budget, TypeMenu, reduce_types, scale_losses
from quant.allocation.sensitivity import F64
from quant.recipes import tensor_types

ROLE_FACTORS = (2.0, 0.5)
MIN_STANDARD_ERRORS = (
    1.0  # an improvement must exceed this many standard errors of the paired difference
)


@dataclass(frozen=True, slots=True)
class RefinementTrial:
    """One measured mix. `role` was treated as `factor` times as sensitive; the first trial changes
    nothing and has an empty `role`.
    """

    role: str
    factor: float
    kld: float
    is_kept: bool


class MixRefinement:
    """A series of trials with one menu and one budget: the starting mix, then at most `max_trials`
    changed ones. `measure` returns the divergence of a mix at each held-out position.
    """

    def __init__(
        self, menu: TypeMenu, budget: Budget, judge: Callable[[Mapping[str, str]], F64], most: int
    ) -> None:
        self.menu, self.budget, self.measure, self.max_trials = menu, budget, judge, most
        self.trials: list[RefinementTrial] = []

    def run(self, start: Allocation) -> Iterator[Allocation]:
        """Measure trial after trial; after each, yield the best mix so far."""
        best, best_klds = start, self.measure(start.mix)
        self.trials.append(RefinementTrial("", 1.0, float(best_klds.mean()), True))
        yield best
        factors: dict[str, float] = dict.fromkeys(self.menu, 1.0)
        seen = {_mix_key(best)}
        for role, names in self._roles(start):
            for factor in ROLE_FACTORS:
                changed = factors | {name: factors[name] * factor for name in names}
                candidate = self._with_measured_losses(
                    reduce_types(scale_losses(self.menu, changed), self.budget)
                )
                if len(self.trials) > self.max_trials or _mix_key(candidate) in seen:
                    continue
                seen.add(_mix_key(candidate))
                klds = self.measure(candidate.mix)
                better = _is_better(klds, best_klds)
                self.trials.append(RefinementTrial(role, factor, float(klds.mean()), better))
                if better:
                    best, best_klds, factors = candidate, klds, changed
                yield best
                if better:
                    break

    def _roles(self, start: Allocation) -> list[tuple[str, list[str]]]:
        """Return the roles with their tensors, the role with the largest loss first."""
        groups: dict[str, list[str]] = {}
        for name in self.menu:
            groups.setdefault(tensor_types.tensor_role(name), []).append(name)
        return sorted(
            groups.items(), key=lambda group: -sum(start.options[name].loss for name in group[1])
        )

    def _with_measured_losses(self, found: Allocation) -> Allocation:
        """Return the same types with the menu's measured losses instead of the scaled ones."""
        named = {
            name: {option.type: option for option in options} for name, options in self.menu.items()
        }
        return Allocation({name: named[name][pick.type] for name, pick in found.options.items()})


def _mix_key(allocation: Allocation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(allocation.mix.items()))


def _is_better(candidate: F64, best: F64) -> bool:
    """Return whether the candidate has a lower divergence than the best mix: the mean of the
    differences at all positions must be below zero by more than MIN_STANDARD_ERRORS standard
    errors.
    """
    change = candidate - best
    error = float(change.std()) / np.sqrt(max(len(change) - 1, 1))
    return bool(change.mean() < -MIN_STANDARD_ERRORS * error)
