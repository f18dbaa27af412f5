"""Texts are divided into groups that one pass can read."""

import random

from llmcli.batch.scoring.executor import divide
from llmcli.runtime.scoring.embedder import MAX_TEXTS


def test_every_text_is_in_one_group_of_limited_size() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 700) for _ in range(rng.randint(0, 200))]
        groups = divide(lengths, 512)
        assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
        for group in groups:
            assert len(group) <= MAX_TEXTS
            assert len(group) == 1 or sum(lengths[number] for number in group) <= 512


def test_texts_of_a_group_have_similar_lengths() -> None:
    assert divide([3, 1, 3, 1], 4) == [[1, 3], [0], [2]]
