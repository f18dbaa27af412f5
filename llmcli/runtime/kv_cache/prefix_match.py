"""The longest cached prefix of a prompt that waits, kept from pass to pass.

Between two passes most slots only grow. A slot that grows can make the prefix longer only if all its
tokens, and then the new ones, are the beginning of the prompt. So the prompt is matched again only
when such a slot has grown, or when a slot was cut, emptied or filled with shared cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixMatch:
    """A match of one prompt.

    - `length`, `holders`: the longest prefix, and the slots that hold it.
    - `generation`: the generation of the cells (CellMap.generation) at the time of the match.
    - `open_ends`: for each slot whose tokens are the beginning of the prompt, their number. An empty
      slot is one of them.
    """

    length: int = 0
    holders: frozenset[int] = frozenset()
    generation: int = -1
    open_ends: dict[int, int] = field(default_factory=dict)

    def is_current(
        self, generation: int, prompt: Sequence[int], slots: Sequence[Sequence[int]]
    ) -> bool:
        """Return whether the match still holds. `generation`: the present one. `prompt`: the tokens
        that were matched. `slots`: the present tokens of all slots.
        """
        if generation != self.generation:
            return False
        for slot, count in tuple(self.open_ends.items()):
            tokens = slots[slot]
            if len(tokens) == count:
                continue
            if count < len(prompt) - 1 and tokens[count] == prompt[count]:
                return False
            del self.open_ends[slot]
        return True
