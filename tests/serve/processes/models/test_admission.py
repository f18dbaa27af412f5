"""Which models are unloaded: compared with all subsets of the loaded models."""

import itertools
import random

import pytest

from llmcli.serve.processes.models.admission import Resident, choose_unloads


def fits(residents: list[Resident], nbytes: int, limit: int) -> bool:
    return sum(resident.nbytes for resident in residents) + nbytes <= limit


@pytest.mark.parametrize("seed", range(300))
def test_the_choice_is_allowed_sufficient_and_minimal(seed: int) -> None:
    random_numbers = random.Random(seed)
    residents = [
        Resident(
            f"m{number}",
            random_numbers.randint(1, 9),
            last_used=number,
            is_busy=random_numbers.random() < 0.3,
            is_pinned=random_numbers.random() < 0.2,
        )
        for number in range(random_numbers.randint(0, 6))
    ]
    random_numbers.shuffle(residents)
    limit = max(sum(resident.nbytes for resident in residents), random_numbers.randint(1, 25))
    nbytes = random_numbers.randint(1, 25)
    chosen = choose_unloads(residents, nbytes, limit)
    free_to_go = [resident for resident in residents if not resident.is_pinned]
    sufficient = [
        subset
        for size in range(len(free_to_go) + 1)
        for subset in itertools.combinations(free_to_go, size)
        if fits([resident for resident in residents if resident not in subset], nbytes, limit)
    ]
    if chosen is None:
        assert sufficient == []
        return
    assert tuple(sorted(chosen, key=free_to_go.index)) in sufficient
    assert not any(set(subset) < set(chosen) for subset in sufficient)  # none is there for nothing
    if any(not any(resident.is_busy for resident in subset) for subset in sufficient):
        assert not any(resident.is_busy for resident in chosen)


def test_what_was_used_longest_ago_goes_first() -> None:
    old, new, large = Resident("old", 2, 1.0), Resident("new", 2, 2.0), Resident("large", 6, 3.0)
    assert choose_unloads([new, old, large], 2, 10) == [old]
    assert choose_unloads([new, old, large], 4, 10) == [old, new]
    # the old ones are not enough and become useless once the large one goes
    assert choose_unloads([new, old, large], 6, 10) == [large]
    assert choose_unloads([], 11, 10) is None
