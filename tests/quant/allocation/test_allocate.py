"""Types under a byte budget, compared with a search over all mixes."""

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


def best(menu: TypeMenu, budget: int) -> float:
    """The least loss of all mixes within a budget."""
    mixes = product(*menu.values())
    return min(
        (sum(o.loss for o in mix) for mix in mixes if sum(o.nbytes for o in mix) <= budget),
        default=inf,
    )


@pytest.mark.parametrize("seed", range(8))
def test_at_its_own_size_no_mix_is_better_and_the_budget_holds(seed: int) -> None:
    menu = random_menu(seed, 5)
    hulls = {name: lower_hull(options) for name, options in menu.items()}
    least, most = size_range(menu)
    for budget in np.linspace(least, most, 9).astype(int).tolist():
        found = allocate(menu, Budget(budget + 100, 100))
        assert found.nbytes <= budget
        # Off the hulls' corners the gap is less than what one step could still gain.
        gap = max(a.loss - b.loss for points in hulls.values() for a, b in pairwise(points))
        assert best(menu, budget) <= found.loss <= best(menu, budget) + gap
    corners = [allocate(hulls, Budget(int(b))) for b in np.linspace(least, most, 5)]
    assert all(one.loss >= other.loss for one, other in pairwise(corners))


@pytest.mark.parametrize("seed", range(6))
def test_every_corner_of_the_lagrangian_is_the_optimum(seed: int) -> None:
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
        assert allocate(menu, Budget(corner)).loss == pytest.approx(best(menu, corner), rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_a_tensor_that_is_most_of_a_model_is_given_what_leaves_least(seed: int) -> None:
    menu = random_menu(seed, 5)
    menu["embedding"] = [TypeOption(one.type, 40 * one.nbytes, 3 * one.loss) for one in menu["t0"]]
    least, most = size_range(menu)
    gaps = [
        a.loss - b.loss
        for name, options in menu.items()
        if name != "embedding"
        for a, b in pairwise(lower_hull(options))
    ]
    for budget in np.linspace(least, most, 13).astype(int).tolist():
        found = allocate(menu, Budget(budget))
        assert found.nbytes <= budget
        assert best(menu, budget) <= found.loss <= best(menu, budget) + max(gaps)


def test_a_hull_has_falling_slopes_and_leaves_out_what_lies_above() -> None:
    options = [
        TypeOption("Q4_0", 45, 8.0),
        TypeOption("Q4_1", 50, 7.9),
        TypeOption("Q5_0", 55, 2.0),
        TypeOption("Q8_0", 85, 2.5),
    ]
    assert [one.type for one in lower_hull(options)] == ["Q4_0", "Q5_0"]


@pytest.mark.parametrize("size", [1, 10**9])
def test_a_size_that_no_mix_reaches_is_refused_with_those_that_are(size: int) -> None:
    menu = random_menu(1, 3)
    least, most = size_range(menu)
    with pytest.raises(
        UserError, match=f"the smallest has {least + 7:,}, the largest {most + 7:,}"
    ):
        allocate(menu, Budget(size, 7))


def test_a_type_is_given_up_only_where_it_costs_little() -> None:
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


def test_what_counts_double_gets_more() -> None:
    menu = {name: [TypeOption("Q4_K", 45, 4.0), TypeOption("Q6_K", 65, 1.0)] for name in ("a", "b")}
    for name in ("a", "b"):
        assert allocate(scale_losses(menu, {name: 2.0}), Budget(110)).options[name].type == "Q6_K"
