"""Which models are unloaded: compared with all subsets of the loaded models."""

import itertools
import random

import pytest

from llmcli.runtime.binding.placement.devices import HOST_DEVICE
from llmcli.serve.processes.models.admission import Resident, choose_unloads

GPUS = ("CUDA0", "CUDA1")


def fits(residents: list[Resident], nbytes: dict[str, int], limits: dict[str, int]) -> bool:
    return all(
        sum(resident.nbytes.get(device, 0) for resident in residents) + size <= limits[device]
        for device, size in nbytes.items()
    )


@pytest.mark.parametrize("devices", [(HOST_DEVICE,), (HOST_DEVICE, *GPUS)])
@pytest.mark.parametrize("seed", range(300))
def test_the_choice_is_allowed_sufficient_and_minimal(seed: int, devices: tuple[str, ...]) -> None:
    random_numbers = random.Random(seed)
    residents = [
        Resident(
            f"m{number}",
            {device: random_numbers.randint(0, 9) for device in devices},
            last_used=number,
            is_busy=random_numbers.random() < 0.3,
            is_pinned=random_numbers.random() < 0.2,
        )
        for number in range(random_numbers.randint(0, 6))
    ]
    random_numbers.shuffle(residents)
    limits = {
        device: max(
            sum(resident.nbytes[device] for resident in residents), random_numbers.randint(1, 25)
        )
        for device in devices
    }
    nbytes = {device: random_numbers.randint(1, 25) for device in devices}
    chosen = choose_unloads(residents, nbytes, limits)
    free_to_go = [resident for resident in residents if not resident.is_pinned]
    sufficient = [
        subset
        for size in range(len(free_to_go) + 1)
        for subset in itertools.combinations(free_to_go, size)
        if fits([resident for resident in residents if resident not in subset], nbytes, limits)
    ]
    if chosen is None:
        assert sufficient == []
        return
    assert tuple(sorted(chosen, key=free_to_go.index)) in sufficient
    assert not any(set_of(subset) < set_of(chosen) for subset in sufficient)  # none is superfluous
    if any(not any(resident.is_busy for resident in subset) for subset in sufficient):
        assert not any(resident.is_busy for resident in chosen)


def set_of(residents: "list[Resident] | tuple[Resident, ...]") -> set[str]:
    return {resident.name for resident in residents}


def host(name: str, nbytes: int, last_used: float) -> Resident:
    return Resident(name, {HOST_DEVICE: nbytes}, last_used)


def test_what_was_used_longest_ago_goes_first() -> None:
    old, new, large = host("old", 2, 1.0), host("new", 2, 2.0), host("large", 6, 3.0)
    limits = {HOST_DEVICE: 10}

    def choose(nbytes: int) -> list[Resident] | None:
        return choose_unloads([new, old, large], {HOST_DEVICE: nbytes}, limits)

    assert choose(2) == [old]
    assert choose(4) == [old, new]
    # the old ones are not enough and become useless once the large one goes
    assert choose(6) == [large]
    assert choose_unloads([], {HOST_DEVICE: 11}, limits) is None


def test_a_model_on_another_device_stays() -> None:
    first = Resident("first", {HOST_DEVICE: 1, "CUDA0": 6}, 1.0)
    second = Resident("second", {HOST_DEVICE: 1, "CUDA1": 6}, 2.0)
    limits = {HOST_DEVICE: 10, "CUDA0": 8, "CUDA1": 8}
    third = {HOST_DEVICE: 1, "CUDA1": 6}
    assert choose_unloads([first, second], third, limits) == [second]
    assert choose_unloads([first, second], {HOST_DEVICE: 8}, limits) == []
    assert choose_unloads([first, second], {"CUDA0": 9}, limits) is None
