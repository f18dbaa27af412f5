"""Prompt chunks: no chunk, remainder or micro-batch is shorter than a tile if avoidable."""

import pytest

from llmcli.runtime.engine.forward_pass import TILE_ROWS, choose_prefill_rows


@pytest.mark.parametrize(
    ("left", "room", "before", "count"),
    [
        (300, 512, 0, 300),
        (543, 512, 0, 479),  # 512 and 31 would leave a short micro-batch
        (543, 480, 3, 479),
        (576, 512, 0, 512),
        (560, 300, 0, 300),
        (350, 300, 2, 350),  # a tile more than there was room for, rather than a short rest
        (512, 512, 3, 448),
        (20, 512, 0, 20),
        (20, 512, 500, 20),  # too short to be cut
        (2079, 2048, 0, 2015),
        (2048, 2048, 0, 2048),
        (70, 40, 2020, 6),  # no room for a tile: what there is
    ],
)
def test_pieces(left: int, room: int, before: int, count: int) -> None:
    assert choose_prefill_rows(left, room, before, 2048, 512) == count


def test_a_prompt_of_any_length_leaves_nothing_short() -> None:
    for length in range(TILE_ROWS, 5000, 7):
        for room in (128, 300, 480, 512, 2048):
            left = length
            while left:
                count = choose_prefill_rows(left, room, 0, 2048, 512)
                assert 0 < count <= min(left, room + TILE_ROWS)
                assert count % 512 == 0 or count % 512 >= TILE_ROWS or count < 512 < room
                assert count >= TILE_ROWS
                left -= count
