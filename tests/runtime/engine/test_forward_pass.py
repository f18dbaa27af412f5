"""Long prompts are split so that no chunk, rest or micro-batch is shorter than a tile if this can
be avoided.
"""

import pytest

from llmcli.runtime.engine.forward_pass import TILE_ROWS, choose_prefill_rows


@pytest.mark.parametrize(
    ("n_left", "free_rows", "used_rows", "count"),
    [
        (300, 512, 0, 300),
        (543, 512, 0, 479),  # 512 and 31 would leave a short micro-batch
        (543, 480, 3, 479),
        (576, 512, 0, 512),
        (560, 300, 0, 300),
        (350, 300, 2, 350),  # up to a tile more than `free_rows`, to avoid a short rest
        (512, 512, 3, 448),
        (20, 512, 0, 20),
        (20, 512, 500, 20),  # too short to split
        (2079, 2048, 0, 2015),
        (2048, 2048, 0, 2048),
        (70, 40, 2020, 6),  # the 28 free rows of the batch would leave 42 tokens, less than a tile
    ],
)
def test_the_rows_of_a_prompt_in_a_pass(
    n_left: int, free_rows: int, used_rows: int, count: int
) -> None:
    assert choose_prefill_rows(n_left, free_rows, used_rows, 2048, 512) == count


def test_a_prompt_of_any_length_has_no_chunk_shorter_than_a_tile() -> None:
    for length in range(TILE_ROWS, 5000, 7):
        for free_rows in (128, 300, 480, 512, 2048):
            n_left = length
            while n_left:
                count = choose_prefill_rows(n_left, free_rows, 0, 2048, 512)
                assert 0 < count <= min(n_left, free_rows + TILE_ROWS)
                assert count % 512 == 0 or count % 512 >= TILE_ROWS or count < 512 < free_rows
                assert count >= TILE_ROWS
                n_left -= count
