"""Refinement of a mix (the choice of a type for every tensor): moves bytes between the tensors of
one role and all other tensors, and accepts a change if it lowers the divergence on held-out text.

Losses that were measured for single tensors add up only approximately. Each trial treats one role
(attn_v, ffn_down, the head) as twice or half as sensitive as measured. This moves bytes to its
tensors or away from them, while the file size stays within the budget. The divergence of the whole
mix then decides.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quant.allocation.allocate import Allocation, Budget, TypeMenu, reduce_types, scale_losses
from quant.allocation.sensitivity import F64
from quant.recipes import tensor_types

ROLE_FACTORS = (2.0, 0.5)
# An improvement must exceed this many standard errors of the paired differences.
MIN_STANDARD_ERRORS = 1.0


@dataclass(frozen=True, slots=True)
class RefinementTrial:
    """One mix that was measured on held-out text. For this mix, the tensors of `role` were treated
    as `factor` times as sensitive as before. `kld` is the mean divergence, and `is_kept` says
    whether the mix became the best one.

    The first trial is the starting mix: its `role` is empty and its `factor` is 1.
    """

    role: str
    factor: float
    kld: float
    is_kept: bool


class MixRefinement:
    """A search for a better mix with the options of `menu` and the bytes of `budget`. `measure`
    returns the divergence of a mix at each held-out position, `[positions]`.

    At most `max_trials` changed mixes are measured, after the starting mix. `trials` records all
    measured mixes.
    """

    def __init__(
        self,
        menu: TypeMenu,
        budget: Budget,
        measure: Callable[[Mapping[str, str]], F64],
        max_trials: int,
    ) -> None:
        self.menu, self.budget, self.measure, self.max_trials = menu, budget, measure, max_trials
        self.trials: list[RefinementTrial] = []

    def run(self, start: Allocation) -> Iterator[Allocation]:
        """Measure `start`, then changed mixes one after another. Yield the best mix so far after
        each measurement.
        """
        best, best_klds = start, self.measure(start.mix)
        self.trials.append(RefinementTrial("", 1.0, float(best_klds.mean()), True))
        yield best
        factors: dict[str, float] = dict.fromkeys(self.menu, 1.0)
        tried = {_mix_key(best)}
        for role, names in self._roles(start):
            for factor in ROLE_FACTORS:
                changed = factors | {name: factors[name] * factor for name in names}
                candidate = self._with_measured_losses(
                    reduce_types(scale_losses(self.menu, changed), self.budget)
                )
                if len(self.trials) > self.max_trials or _mix_key(candidate) in tried:
                    continue
                tried.add(_mix_key(candidate))
                klds = self.measure(candidate.mix)
                is_better = _is_better(klds, best_klds)
                self.trials.append(RefinementTrial(role, factor, float(klds.mean()), is_better))
                if is_better:
                    best, best_klds, factors = candidate, klds, changed
                yield best
                if is_better:
                    break

    def _roles(self, start: Allocation) -> list[tuple[str, list[str]]]:
        """Return (role, names of its tensors) pairs, the role with the largest loss in `start`
        first.
        """
        groups: dict[str, list[str]] = {}
        for name in self.menu:
            groups.setdefault(tensor_types.tensor_role(name), []).append(name)
        return sorted(
            groups.items(), key=lambda group: -sum(start.options[name].loss for name in group[1])
        )

    def _with_measured_losses(self, scaled: Allocation) -> Allocation:
        """Return an allocation with the types of `scaled`, but with the measured losses of the
        menu. `scaled` was computed with losses that were multiplied by trial factors.
        """
        measured = {
            name: {option.type: option for option in options} for name, options in self.menu.items()
        }
        return Allocation(
            {name: measured[name][pick.type] for name, pick in scaled.options.items()}
        )


def _mix_key(allocation: Allocation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(allocation.mix.items()))


def _is_better(candidate: F64, best: F64) -> bool:
    """Return whether a candidate mix diverges less than the best mix, given the divergences of both
    at the same positions. The mean of the differences must be below zero by more than
    MIN_STANDARD_ERRORS standard errors.
    """
    change = candidate - best
    error = float(change.std()) / np.sqrt(max(len(change) - 1, 1))
    return bool(change.mean() < -MIN_STANDARD_ERRORS * error)
