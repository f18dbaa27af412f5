"""Decides at which lengths of a prompt checkpoints are taken. A pure function of its tokens."""

from collections.abc import Sequence

from llmcli.runtime.vocabulary import Vocabulary

# The start of the assistant's message, which a template adds to a prompt, is at most this long.
MAX_START_TOKENS = 64


def checkpoint_lengths(prompt: Sequence[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the lengths of a prompt at which its passes end for a checkpoint, ascending.

    One is before the last token: another answer to the same prompt computes only this token. The
    other is after the last message, where the template starts the assistant's: later prompts may
    continue differently from there, because templates leave out the thinking of earlier answers.
    """
    whole = len(prompt) - 1
    if whole < 1:
        return ()
    for length in range(whole, max(0, whole - MAX_START_TOKENS), -1):
        if vocabulary.is_end(prompt[length - 1]):
            return (length,) if length == whole else (length, whole)
    return (whole,)
