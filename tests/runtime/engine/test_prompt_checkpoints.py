"""Where the passes of a prompt end for a checkpoint."""

import pytest

from llmcli.runtime.engine.prompt_checkpoints import MAX_START_TOKENS, checkpoint_lengths
from tests.fixtures.fakes import EOS, FakeModel


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5], ()),
        ([5, 6, 7], (2,)),
        ([5, EOS, 6, EOS, 7, 8, 9], (4, 6)),  # after the last message, and before the last token
        ([5, EOS, 7], (2,)),
        ([5, 6, EOS], (2,)),
        ([5, EOS, *[6] * (MAX_START_TOKENS + 1)], (MAX_START_TOKENS + 2,)),
    ],
)
def test_checkpoints_of_a_prompt(prompt: list[int], expected: tuple[int, ...]) -> None:
    assert checkpoint_lengths(prompt, FakeModel()) == expected
