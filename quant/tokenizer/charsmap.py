"""SentencePiece's compiled character rules (precompiled_charsmap): at each position of a text, the
longest prefix with a rule is replaced.

Layout: the size of the array in bytes (uint32), a double array of prefixes in darts-clone's format
(Kanda 2018), then the replacements, each followed by a zero byte.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Units = np.ndarray[tuple[int], np.dtype[np.uint32]]

MAX_BYTES = 1 << 22  # limit of the bytes of rules; SentencePiece's own rules take about 250,000
BLOCK_SLOTS = 256  # slots of a block: one for each value of a byte
LABEL_MASK, VALUE_MASK, LEAF_FLAG, WIDE_FLAG = 0x8000_00FF, 0x7FFF_FFFF, 1 << 8, 1 << 9
MAX_NARROW_OFFSET = 1 << 21  # offsets from here on need WIDE_FLAG
OPEN_BLOCKS = 8  # only the free slots of this many of the newest blocks are still used


@dataclass(frozen=True, slots=True)
class Charsmap:
    """Rules that `parse_charsmap` has checked: no text can lead outside of the array."""

    units: tuple[int, ...]
    replacements: bytes

    def apply(self, text: str) -> str:
        """Return the text with rules applied from left to right: at each position the longest
        prefix that has a rule is replaced.
        """
        data, replaced, at = text.encode(), bytearray(), 0
        while at < len(data):
            length, replacement = self._longest(data, at)
            if not length:
                length = _width(data[at])
                replacement = data[at : at + length]
            replaced += replacement
            at += length
        return replaced.decode("utf-8", "replace")

    def has_rule(self, text: str) -> bool:
        """Return whether the whole text has a rule."""
        data = text.encode()
        return self._longest(data, 0)[0] == len(data)

    def _longest(self, data: bytes, at: int) -> tuple[int, bytes]:
        node, position, length = _offset(self.units[0]), -1, 0
        for index in range(at, len(data)):
            char = data[index]
            node ^= char
            unit = self.units[node]
            if not char or unit & LABEL_MASK != char:
                break
            node ^= _offset(unit)
            if unit & LEAF_FLAG:
                position, length = self.units[node] & VALUE_MASK, index - at + 1
        return length, self.replacements[
            position : self.replacements.index(0, position)
        ] if length else b""


def parse_charsmap(data: bytes) -> Charsmap:
    """Read and check rules.

    Raises ValueError if some text could lead outside of the array, because llama.cpp would crash on
    it.
    """
    units, texts = _split(data)
    _leaves(units, len(texts))
    return Charsmap(tuple(units.tolist()), texts)


def build_charsmap(rules: Mapping[str, str]) -> bytes:
    """Pack rules, given as prefix -> replacement, into a precompiled_charsmap; no rules give no
    bytes.

    Prefixes must not be empty, and neither prefixes nor replacements may contain a zero character.
    """
    if not rules:
        return b""
    array, texts = _Array([0]), _Texts()
    trie: _Node = {}
    for prefix, replacement in sorted(rules.items()):
        node = trie
        for char in prefix.encode():
            below = node.setdefault(char, {})
            assert isinstance(below, dict), prefix
            node = below
        node[0] = texts.add(replacement)
    array.fill(trie)
    return _packed(array, texts)


def append_step(data: bytes, step: Callable[[str], str], chars: Iterable[str]) -> bytes:
    """Return rules that apply the rules in `data` and then `step`, which maps a text character by
    character.

    `chars` are the characters that `step` may change.
    """
    units, old_texts = _split(data)
    array, texts, rules = _Array(units.tolist()), _Texts(), parse_charsmap(data)
    for leaf in _leaves(units, len(old_texts)):
        first = int(units[leaf]) & VALUE_MASK
        array.units[leaf] = (
            texts.add(step(old_texts[first : old_texts.index(0, first)].decode("utf-8", "replace")))
            | 1 << 31
        )
    for char in chars:
        if (changed := step(char)) != char and not rules.has_rule(char):
            array.add(char.encode(), texts.add(changed))
    return _packed(array, texts)


def _split(data: bytes) -> tuple["Units", bytes]:
    import numpy as np

    if not 8 < len(data) <= MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes")
    (nbytes,) = struct.unpack_from("<I", data)
    if not nbytes or nbytes % 4 or 4 + nbytes >= len(data) or data[-1]:
        raise ValueError(f"its array of {nbytes} bytes does not fit into {len(data)}")
    return np.frombuffer(data, "<u4", nbytes // 4, 4), data[4 + nbytes :]


def _leaves(units: "Units", texts: int) -> list[int]:
    """Follow every transition that some text could take, each once; return the slots of all
    replacements.

    Raises ValueError if a transition leads outside of the array, or a replacement is not in the
    data.
    """
    import numpy as np

    bytewise = np.arange(1, BLOCK_SLOTS, dtype=np.int64)
    seen, leaves = np.zeros(len(units) + BLOCK_SLOTS, bool), set[int]()
    waiting = [np.array([_offset(int(units[0]))])]
    while waiting:
        index = waiting.pop()[:, None] ^ bytewise  # [nodes, 255]
        if index.max() >= len(units):
            raise ValueError("its array leads outside of itself")
        candidates = units[index]
        is_child = (candidates & LABEL_MASK) == bytewise
        unit = candidates[is_child].astype(np.int64)
        after = index[is_child] ^ ((unit >> 10) << ((unit & WIDE_FLAG) >> 6))
        if after.size and after.max() >= len(seen):
            raise ValueError("its array leads outside of itself")
        ends = np.unique(after[(unit & LEAF_FLAG) != 0])
        if ends.size and (ends[-1] >= len(units) or (units[ends] & VALUE_MASK).max() >= texts):
            raise ValueError("its array leads outside of its replacements")
        leaves.update(ends.tolist())
        new = np.unique(after[~seen[after]])
        seen[new] = True
        waiting += [new[at : at + 4096] for at in range(0, len(new), 4096)]
    return sorted(leaves)


# child nodes by byte; key 0 has the position of the replacement for the prefix that ends in this
# node
_Node = dict[int, "_Node | int"]


class _Texts:
    """The replacements, each stored once."""

    def __init__(self) -> None:
        self.data, self.positions = bytearray(), dict[str, int]()

    def add(self, text: str) -> int:
        """Return the position of a replacement; a new one is appended first."""
        if text not in self.positions:
            self.positions[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.positions[text]


class _Array:
    """A double array that grows. The child of a node for a byte is in the slot base XOR byte, where
    the base belongs to the node.
    """

    def __init__(self, units: list[int]) -> None:
        self.units = units + [0] * (-len(units) % BLOCK_SLOTS)
        self.free: dict[int, None] = {}  # free slots of the newest blocks, in order
        self.bases: set[int] = set()

    def fill(self, trie: _Node) -> None:
        """Write a trie into an empty array."""
        waiting = [(trie, 0)]
        while waiting:
            node, index = waiting.pop()
            base = self._base(list(node))
            self._point(index, base)
            for char, child in node.items():
                if isinstance(child, int):
                    self.units[base ^ char] = child | 1 << 31
                else:
                    self.units[base ^ char] = char | (LEAF_FLAG if 0 in child else 0)
                    waiting.append((child, base ^ char))

    def add(self, prefix: bytes, position: int) -> None:
        """Add one more prefix, which must not have a rule yet."""
        index, fresh = 0, False
        for char in prefix:
            base = index ^ _offset(self.units[index])
            if fresh or self.units[base ^ char] & LABEL_MASK != char:
                base = self._moved(index, char, fresh)
                self.units[base ^ char], fresh = char, True
            index = base ^ char
        self.units[self._moved(index, 0, fresh)] = position | 1 << 31
        self.units[index] |= LEAF_FLAG

    def _moved(self, index: int, char: int, fresh: bool) -> int:
        """Move a node's children to a base that also has room for a child for the byte `char`;
        return the base.

        A `fresh` node has no children yet.
        """
        old = index ^ _offset(self.units[index])
        below = (
            []
            if fresh
            else [at for at in range(1, BLOCK_SLOTS) if self.units[old ^ at] & LABEL_MASK == at]
        )
        if not fresh and self.units[index] & LEAF_FLAG:
            below.append(0)
        base = self._base([*below, char])
        for at in below:
            unit = self.units[old ^ at]
            self.units[base ^ at] = unit
            if at:
                self._point(base ^ at, old ^ at ^ _offset(unit))
        self._point(index, base)
        return base

    def _point(self, index: int, base: int) -> None:
        assert base ^ index < MAX_NARROW_OFFSET, (base, index)
        self.units[index] = self.units[index] & (LABEL_MASK | LEAF_FLAG) | (base ^ index) << 10

    def _base(self, chars: list[int]) -> int:
        """Return an unused base whose slots for these bytes are free, and take these slots."""
        fit = (slot ^ chars[0] for slot in self._slots())
        base = next(
            base
            for base in fit
            if base not in self.bases and all(base ^ char in self.free for char in chars)
        )
        self.bases.add(base)
        for char in chars:
            del self.free[base ^ char]
        return base

    def _slots(self) -> Iterator[int]:
        yield from self.free
        while True:
            first = len(self.units)
            self.units += [0] * BLOCK_SLOTS
            for slot in [slot for slot in self.free if slot < first - OPEN_BLOCKS * BLOCK_SLOTS]:
                del self.free[slot]  # a slot that has stayed free for so many blocks is given up
            self.free |= dict.fromkeys(range(first, first + BLOCK_SLOTS))
            yield from range(first, first + BLOCK_SLOTS)


def _packed(array: _Array, texts: _Texts) -> bytes:
    return struct.pack(f"<I{len(array.units)}I", 4 * len(array.units), *array.units) + bytes(
        texts.data
    )


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & WIDE_FLAG) >> 6)


def _width(lead: int) -> int:
    """Return the number of bytes of a UTF-8 character, given its first byte."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
