"""SentencePiece's compiled character rules (precompiled_charsmap). A rule replaces a prefix: at
each position of a text, the longest prefix that has a rule is replaced.

Layout: the size of the array in bytes (uint32), a double array of the prefixes in the format of
darts-clone (Kanda 2018), then the replacements, each followed by a zero byte. A double array stores
a trie (a tree with one byte on each edge) as 32-bit units. The child of a node for a byte is in
slot base XOR byte, where the node's unit contains the base relative to its own slot. Byte 0 leads
to a leaf, whose unit has the position of the replacement.
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
# Fields of a unit: the byte of the edge to this node (with bit 31, which only leaves have), the
# position in a leaf, whether the node has a leaf, and whether the offset is in units of 256.
LABEL_MASK, VALUE_MASK, LEAF_FLAG, WIDE_FLAG = 0x8000_00FF, 0x7FFF_FFFF, 1 << 8, 1 << 9
MAX_NARROW_OFFSET = 1 << 21  # offsets from here on need WIDE_FLAG
OPEN_BLOCKS = 8  # number of the newest blocks whose free slots are still used


@dataclass(frozen=True, slots=True)
class Charsmap:
    """Character rules that `parse_charsmap` has checked: no text can lead outside of the array.
    `units` is the double array, `replacements` are the texts with a zero byte after each.
    """

    units: tuple[int, ...]
    replacements: bytes

    def apply(self, text: str) -> str:
        """Return the text with the rules applied from left to right: at each position the longest
        prefix that has a rule is replaced.
        """
        data, replaced, at = text.encode(), bytearray(), 0
        while at < len(data):
            length, replacement = self._longest(data, at)
            if not length:
                length = _utf8_width(data[at])
                replacement = data[at : at + length]
            replaced += replacement
            at += length
        return replaced.decode("utf-8", "replace")

    def has_rule(self, text: str) -> bool:
        """Return whether there is a rule for the complete text as a prefix."""
        data = text.encode()
        return self._longest(data, 0)[0] == len(data)

    def _longest(self, data: bytes, at: int) -> tuple[int, bytes]:
        """Return the number of bytes of the longest prefix of data[at:] that has a rule, and its
        replacement. Return (0, b"") if there is none.
        """
        node, position, length = _base_offset(self.units[0]), -1, 0
        for index in range(at, len(data)):
            char = data[index]
            node ^= char
            unit = self.units[node]
            if not char or unit & LABEL_MASK != char:
                break
            node ^= _base_offset(unit)
            if unit & LEAF_FLAG:
                position, length = self.units[node] & VALUE_MASK, index - at + 1
        return length, self.replacements[
            position : self.replacements.index(0, position)
        ] if length else b""


def parse_charsmap(data: bytes) -> Charsmap:
    """Read and check compiled character rules.

    Raises ValueError if some text could lead outside of the array: llama.cpp does not check this
    and would crash on the text.
    """
    units, texts = _split_parts(data)
    _find_leaves(units, len(texts))
    return Charsmap(tuple(units.tolist()), texts)


def build_charsmap(rules: Mapping[str, str]) -> bytes:
    """Compile rules, given as prefix -> replacement, into a precompiled_charsmap. No rules give
    b"".

    Prefixes must not be empty, and neither prefixes nor replacements may contain a zero character.
    """
    if not rules:
        return b""
    array, texts = _Array([0]), _Texts()
    trie: _Node = {}
    for prefix, replacement in sorted(rules.items()):
        node = trie
        for char in prefix.encode():
            child = node.setdefault(char, {})
            assert isinstance(child, dict), prefix
            node = child
        node[0] = texts.add(replacement)
    array.fill(trie)
    return _pack(array, texts)


def append_step(data: bytes, step: Callable[[str], str], chars: Iterable[str]) -> bytes:
    """Return compiled rules that first apply the rules in `data` and then `step`, which maps a text
    character by character.

    `chars` are the characters that `step` may change.
    """
    units, old_texts = _split_parts(data)
    array, texts, rules = _Array(units.tolist()), _Texts(), parse_charsmap(data)
    for leaf in _find_leaves(units, len(old_texts)):
        first = int(units[leaf]) & VALUE_MASK
        array.units[leaf] = (
            texts.add(step(old_texts[first : old_texts.index(0, first)].decode("utf-8", "replace")))
            | 1 << 31
        )
    for char in chars:
        if (changed := step(char)) != char and not rules.has_rule(char):
            array.add(char.encode(), texts.add(changed))
    return _pack(array, texts)


def _split_parts(data: bytes) -> tuple["Units", bytes]:
    """Return the units of the double array and the replacements. Raises ValueError if the sizes do
    not fit.
    """
    import numpy as np

    if not 8 < len(data) <= MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes")
    (nbytes,) = struct.unpack_from("<I", data)
    if not nbytes or nbytes % 4 or 4 + nbytes >= len(data) or data[-1]:
        raise ValueError(f"its array of {nbytes} bytes does not fit into {len(data)}")
    return np.frombuffer(data, "<u4", nbytes // 4, 4), data[4 + nbytes :]


def _find_leaves(units: "Units", text_bytes: int) -> list[int]:
    """Follow every edge that some text could take. Return the slots of all leaves. `text_bytes` is
    the size of the replacements.

    Raises ValueError if an edge leads outside of the array, or if a leaf points outside of the
    replacements.
    """
    import numpy as np

    byte_values = np.arange(1, BLOCK_SLOTS, dtype=np.int64)
    is_seen, leaves = np.zeros(len(units) + BLOCK_SLOTS, bool), set[int]()
    pending = [np.array([_base_offset(int(units[0]))])]
    while pending:
        slots = pending.pop()[:, None] ^ byte_values  # [nodes, 255]
        if slots.max() >= len(units):
            raise ValueError("its array leads outside of itself")
        candidates = units[slots]
        is_child = (candidates & LABEL_MASK) == byte_values
        child_units = candidates[is_child].astype(np.int64)
        bases = slots[is_child] ^ ((child_units >> 10) << ((child_units & WIDE_FLAG) >> 6))
        if bases.size and bases.max() >= len(is_seen):
            raise ValueError("its array leads outside of itself")
        leaf_slots = np.unique(bases[(child_units & LEAF_FLAG) != 0])
        if leaf_slots.size and (
            leaf_slots[-1] >= len(units) or (units[leaf_slots] & VALUE_MASK).max() >= text_bytes
        ):
            raise ValueError("its array leads outside of its replacements")
        leaves.update(leaf_slots.tolist())
        new_bases = np.unique(bases[~is_seen[bases]])
        is_seen[new_bases] = True
        pending += [new_bases[at : at + 4096] for at in range(0, len(new_bases), 4096)]
    return sorted(leaves)


# A node of a trie: its children by byte. Key 0 has the position of the replacement for the prefix
# that ends in this node.
_Node = dict[int, "_Node | int"]


class _Texts:
    """The replacements that are being collected. Each distinct text is stored once."""

    def __init__(self) -> None:
        self.data, self.positions = bytearray(), dict[str, int]()

    def add(self, text: str) -> int:
        """Return the position of a replacement, which is appended if it is new."""
        if text not in self.positions:
            self.positions[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.positions[text]


class _Array:
    """A double array that is being built and grows as needed. `free` has the unused slots of the
    newest blocks, in order. A base must not be used by two nodes, so `bases` has those in use.
    """

    def __init__(self, units: list[int]) -> None:
        self.units = units + [0] * (-len(units) % BLOCK_SLOTS)
        self.free: dict[int, None] = {}  # free slots of the newest blocks, in order
        self.bases: set[int] = set()

    def fill(self, trie: _Node) -> None:
        """Write a trie into an empty array."""
        pending = [(trie, 0)]
        while pending:
            node, index = pending.pop()
            base = self._take_base(list(node))
            self._set_base(index, base)
            for char, child in node.items():
                if isinstance(child, int):
                    self.units[base ^ char] = child | 1 << 31
                else:
                    self.units[base ^ char] = char | (LEAF_FLAG if 0 in child else 0)
                    pending.append((child, base ^ char))

    def add(self, prefix: bytes, position: int) -> None:
        """Add a rule for `prefix`, which must not have one yet. `position` is that of the
        replacement.
        """
        index, is_new = 0, False
        for char in prefix:
            base = index ^ _base_offset(self.units[index])
            if is_new or self.units[base ^ char] & LABEL_MASK != char:
                base = self._move_children(index, char, is_new)
                self.units[base ^ char], is_new = char, True
            index = base ^ char
        self.units[self._move_children(index, 0, is_new)] = position | 1 << 31
        self.units[index] |= LEAF_FLAG

    def _move_children(self, index: int, char: int, is_new: bool) -> int:
        """Move a node's children to a base that also has a free slot for a child for `char`. Return
        the base.

        `index` is the node's slot. A node `is_new` if it has no children yet.
        """
        old_base = index ^ _base_offset(self.units[index])
        child_bytes = (
            []
            if is_new
            else [
                byte
                for byte in range(1, BLOCK_SLOTS)
                if self.units[old_base ^ byte] & LABEL_MASK == byte
            ]
        )
        if not is_new and self.units[index] & LEAF_FLAG:
            child_bytes.append(0)
        base = self._take_base([*child_bytes, char])
        for byte in child_bytes:
            unit = self.units[old_base ^ byte]
            self.units[base ^ byte] = unit
            if byte:
                self._set_base(base ^ byte, old_base ^ byte ^ _base_offset(unit))
        self._set_base(index, base)
        return base

    def _set_base(self, index: int, base: int) -> None:
        """Set the base of the node in slot `index`."""
        assert base ^ index < MAX_NARROW_OFFSET, (base, index)
        self.units[index] = self.units[index] & (LABEL_MASK | LEAF_FLAG) | (base ^ index) << 10

    def _take_base(self, chars: list[int]) -> int:
        """Return an unused base whose slots for these bytes are free, and take these slots."""
        candidates = (slot ^ chars[0] for slot in self._free_slots())
        base = next(
            base
            for base in candidates
            if base not in self.bases and all(base ^ char in self.free for char in chars)
        )
        self.bases.add(base)
        for char in chars:
            del self.free[base ^ char]
        return base

    def _free_slots(self) -> Iterator[int]:
        """Yield free slots. The array grows if there are no more."""
        yield from self.free
        while True:
            first = len(self.units)
            self.units += [0] * BLOCK_SLOTS
            for slot in [slot for slot in self.free if slot < first - OPEN_BLOCKS * BLOCK_SLOTS]:
                del self.free[
                    slot
                ]  # the slots of older blocks are given up, to keep the search short
            self.free |= dict.fromkeys(range(first, first + BLOCK_SLOTS))
            yield from range(first, first + BLOCK_SLOTS)


def _pack(array: _Array, texts: _Texts) -> bytes:
    """Return the array and the replacements as a precompiled_charsmap."""
    return struct.pack(f"<I{len(array.units)}I", 4 * len(array.units), *array.units) + bytes(
        texts.data
    )


def _base_offset(unit: int) -> int:
    """Return the distance (by XOR) from a node's slot to its base."""
    return (unit >> 10) << ((unit & WIDE_FLAG) >> 6)


def _utf8_width(lead: int) -> int:
    """Return the number of bytes of a UTF-8 character, given its first byte."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
