"""The choice of tensor types under a byte budget, compared with a search over all mixes."""

from itertools import pairwise, product
from math import inf

import numpy as np
import pytest

from quant.allocation.allocate import (
    Budget,
    TypeMenu,
    TypeOption,
    allocate,
    lower_hull,
    reduce_types,
    scale_losses,
    size_range,
)
from quant.errors import UserError

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def random_menu(seed: int, tensors: int, options: int = 4) -> TypeMenu:
    random = np.random.default_rng(seed)
    menu = {}
    for number in range(tensors):
        bits = (
            np.sort(random.choice(np.arange(2, 12), options, replace=False))
            * int(random.integers(1, 9))
            * 32
        )
        losses = random.random() * 2.0 ** (-np.arange(options) * (1 + random.random(options) / 2))
        menu[f"t{number}"] = [
            TypeOption(TYPES[i], int(bits[i]), float(losses[i])) for i in range(options)
        ]
    return menu


def least_loss(menu: TypeMenu, budget: int) -> float:
    """Return the smallest loss of all mixes within `budget` bytes, or infinity if none fits."""
    mixes = product(*menu.values())
    return min(
        (sum(o.loss for o in mix) for mix in mixes if sum(o.nbytes for o in mix) <= budget),
        default=inf,
    )


@pytest.mark.parametrize("seed", range(8))
def test_allocation_is_within_one_step_of_the_optimum_and_within_the_budget(seed: int) -> None:
    menu = random_menu(seed, 5)
    hulls = {name: lower_hull(options) for name, options in menu.items()}
    smallest, largest = size_range(menu)
    for budget in np.linspace(smallest, largest, 9).astype(int).tolist():
        allocation = allocate(menu, Budget(budget + 100, 100))
        assert allocation.nbytes <= budget
        # Between two corners, the gap to the optimum is at most the gain of one step on a hull.
        gap = max(a.loss - b.loss for points in hulls.values() for a, b in pairwise(points))
        assert least_loss(menu, budget) <= allocation.loss <= least_loss(menu, budget) + gap
    corners = [allocate(hulls, Budget(int(b))) for b in np.linspace(smallest, largest, 5)]
    assert all(smaller.loss >= larger.loss for smaller, larger in pairwise(corners))


@pytest.mark.parametrize("seed", range(6))
def test_allocation_is_optimal_at_every_corner_of_the_lagrangian(seed: int) -> None:
    menu = random_menu(seed, 4)
    hulls = {name: lower_hull(options) for name, options in menu.items()}
    steps = sorted(
        (b.loss - a.loss) / (b.nbytes - a.nbytes)
        for points in hulls.values()
        for a, b in pairwise(points)
    )
    for slope in steps:
        price = -slope * (1 - 1e-9)
        corner = sum(
            min((o.loss + price * o.nbytes, o.nbytes) for o in points)[1]
            for points in hulls.values()
        )
        assert allocate(menu, Budget(corner)).loss == pytest.approx(
            least_loss(menu, corner), rel=1e-12
        )


@pytest.mark.parametrize("seed", range(12))
def test_allocation_is_near_the_optimum_when_one_tensor_is_most_of_the_model(seed: int) -> None:
    menu = random_menu(seed, 5)
    menu["embedding"] = [
        TypeOption(option.type, 40 * option.nbytes, 3 * option.loss) for option in menu["t0"]
    ]
    smallest, largest = size_range(menu)
    gaps = [
        a.loss - b.loss
        for name, options in menu.items()
        if name != "embedding"
        for a, b in pairwise(lower_hull(options))
    ]
    for budget in np.linspace(smallest, largest, 13).astype(int).tolist():
        allocation = allocate(menu, Budget(budget))
        assert allocation.nbytes <= budget
        assert least_loss(menu, budget) <= allocation.loss <= least_loss(menu, budget) + max(gaps)


def test_hull_leaves_out_options_that_lie_above_it() -> None:
    options = [
        TypeOption("Q4_0", 45, 8.0),
        TypeOption("Q4_1", 50, 7.9),
        TypeOption("Q5_0", 55, 2.0),
        TypeOption("Q8_0", 85, 2.5),
    ]
    assert [option.type for option in lower_hull(options)] == ["Q4_0", "Q5_0"]


@pytest.mark.parametrize("size", [1, 10**9])
def test_unreachable_size_is_refused_with_the_smallest_and_largest_size(size: int) -> None:
    menu = random_menu(1, 3)
    smallest, largest = size_range(menu)
    with pytest.raises(
        UserError, match=f"the smallest has {smallest + 7:,}, the largest {largest + 7:,}"
    ):
        allocate(menu, Budget(size, 7))


def test_type_is_dropped_only_where_that_adds_little_loss() -> None:
    near = {
        f"t{i}": [
            TypeOption("Q4_K", 450, 4.0),
            TypeOption("Q5_K", 550, 1.0),
            TypeOption("Q5_1", 551, 0.999),
        ]
        for i in range(6)
    }
    assert set(reduce_types(near, Budget(6 * 551 - 3), max_types=1).types) == {"Q5_K"}
    far = {f"t{i}": [TypeOption("Q4_K", 45, 4.0), TypeOption("Q8_0", 85, 0.01)] for i in range(6)}
    assert set(reduce_types(far, Budget(3 * 85 + 3 * 45), max_types=1).types) == {"Q4_K", "Q8_0"}


def test_tensor_with_doubled_losses_gets_the_larger_type() -> None:
    menu = {name: [TypeOption("Q4_K", 45, 4.0), TypeOption("Q6_K", 65, 1.0)] for name in ("a", "b")}
    for name in ("a", "b"):
        assert allocate(scale_losses(menu, {name: 2.0}), Budget(110)).options[name].type == "Q6_K"
