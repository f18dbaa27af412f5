"""SentencePiece's compiled rules for characters (precompiled_charsmap): the longest prefix with a
rule is replaced.

The layout: how many bytes the array has (uint32), a double array of prefixes as darts-clone packs
it (Kanda 2018), then the replacements, each with a zero byte behind. It knows bytes and text, no
tokenizers.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Units = np.ndarray[tuple[int], np.dtype[np.uint32]]

LARGEST = 1 << 22  # bytes; SentencePiece's own are a quarter of a million
BLOCK = 256  # one slot for every byte
LABEL, VALUE, LEAF, WIDE = 0x8000_00FF, 0x7FFF_FFFF, 1 << 8, 1 << 9
REACH = 1 << 21  # offsets that fit without WIDE
OPEN = 8  # blocks that are still filled


@dataclass(frozen=True, slots=True)
class Charsmap:
    """Rules that `parse` has found sound: no text leads outside of them."""

    units: tuple[int, ...]
    texts: bytes

    def apply(self, text: str) -> str:
        """The text with every prefix replaced that has a rule, the longest first."""
        data, made, at = text.encode(), bytearray(), 0
        while at < len(data):
            length, replacement = self._longest(data, at)
            if not length:
                length = _width(data[at])
                replacement = data[at : at + length]
            made += replacement
            at += length
        return made.decode("utf-8", "replace")

    def covers(self, text: str) -> bool:
        """Whether a text as a whole has a rule."""
        data = text.encode()
        return self._longest(data, 0)[0] == len(data)

    def _longest(self, data: bytes, at: int) -> tuple[int, bytes]:
        node, found, length = _offset(self.units[0]), -1, 0
        for place in range(at, len(data)):
            char = data[place]
            node ^= char
            unit = self.units[node]
            if not char or unit & LABEL != char:
                break
            node ^= _offset(unit)
            if unit & LEAF:
                found, length = self.units[node] & VALUE, place - at + 1
        return length, self.texts[found : self.texts.index(0, found)] if length else b""


def parse(data: bytes) -> Charsmap:
    """Read rules; raises ValueError where a text could lead outside of them, which would end a
    process of llama.cpp.
    """
    units, texts = _split(data)
    _leaves(units, len(texts))
    return Charsmap(tuple(units.tolist()), texts)


def build(rules: Mapping[str, str]) -> bytes:
    """Pack rules, prefix -> replacement; neither has a zero character, no prefix is empty. No rules
    are no bytes.
    """
    if not rules:
        return b""
    array, texts = _Array([0]), _Texts()
    trie: _Node = {}
    for prefix, made in sorted(rules.items()):
        node = trie
        for char in prefix.encode():
            below = node.setdefault(char, {})
            assert isinstance(below, dict), prefix
            node = below
        node[0] = texts.place(made)
    array.fill(trie)
    return _packed(array, texts)


def followed(data: bytes, after: Callable[[str], str], chars: Iterable[str]) -> bytes:
    """Rules that do what these do and then `after`, which takes a text character by character.

    `chars` are those that it may change.
    """
    units, old = _split(data)
    array, texts, known = _Array(units.tolist()), _Texts(), parse(data)
    for leaf in _leaves(units, len(old)):
        first = int(units[leaf]) & VALUE
        array.units[leaf] = (
            texts.place(after(old[first : old.index(0, first)].decode("utf-8", "replace")))
            | 1 << 31
        )
    for char in chars:
        if (made := after(char)) != char and not known.covers(char):
            array.add(char.encode(), texts.place(made))
    return _packed(array, texts)


def _split(data: bytes) -> tuple["Units", bytes]:
    import numpy as np

    if not 8 < len(data) <= LARGEST:
        raise ValueError(f"it has {len(data)} bytes")
    (nbytes,) = struct.unpack_from("<I", data)
    if not nbytes or nbytes % 4 or 4 + nbytes >= len(data) or data[-1]:
        raise ValueError(f"its array of {nbytes} bytes does not fit into {len(data)}")
    return np.frombuffer(data, "<u4", nbytes // 4, 4), data[4 + nbytes :]


def _leaves(units: "Units", texts: int) -> list[int]:
    """Take every step that any text could take, each once; returns where the places of replacements
    stand.
    """
    import numpy as np

    bytewise = np.arange(1, BLOCK, dtype=np.int64)
    seen, leaves = np.zeros(len(units) + BLOCK, bool), set[int]()
    waiting = [np.array([_offset(int(units[0]))])]
    while waiting:
        index = waiting.pop()[:, None] ^ bytewise  # [nodes, 255]
        if index.max() >= len(units):
            raise ValueError("its array leads outside of itself")
        found = units[index]
        hit = (found & LABEL) == bytewise
        unit = found[hit].astype(np.int64)
        after = index[hit] ^ ((unit >> 10) << ((unit & WIDE) >> 6))
        if after.size and after.max() >= len(seen):
            raise ValueError("its array leads outside of itself")
        ends = np.unique(after[(unit & LEAF) != 0])
        if ends.size and (ends[-1] >= len(units) or (units[ends] & VALUE).max() >= texts):
            raise ValueError("its array leads outside of its replacements")
        leaves.update(ends.tolist())
        fresh = np.unique(after[~seen[after]])
        seen[fresh] = True
        waiting += [fresh[at : at + 4096] for at in range(0, len(fresh), 4096)]
    return sorted(leaves)


_Node = dict[int, "_Node | int"]  # by byte; 0 holds the place of the replacement of what leads here


class _Texts:
    """Replacements, each once."""

    def __init__(self) -> None:
        self.data, self.places = bytearray(), dict[str, int]()

    def place(self, text: str) -> int:
        """Where a replacement stands; it is put at the end if it is new."""
        if text not in self.places:
            self.places[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.places[text]


class _Array:
    """A double array that grows: the child of a node by a byte stands at the node's base XOR that
    byte.
    """

    def __init__(self, units: list[int]) -> None:
        self.units = units + [0] * (-len(units) % BLOCK)
        self.free: dict[int, None] = {}  # slots of the last blocks, in their order
        self.bases: set[int] = set()

    def fill(self, trie: _Node) -> None:
        """Put a trie below the root of an empty array."""
        waiting = [(trie, 0)]
        while waiting:
            node, index = waiting.pop()
            base = self._base(list(node))
            self._point(index, base)
            for char, child in node.items():
                if isinstance(child, int):
                    self.units[base ^ char] = child | 1 << 31
                else:
                    self.units[base ^ char] = char | (LEAF if 0 in child else 0)
                    waiting.append((child, base ^ char))

    def add(self, prefix: bytes, place: int) -> None:
        """Put in one more prefix, which has no rule yet."""
        index, fresh = 0, False
        for char in prefix:
            base = index ^ _offset(self.units[index])
            if fresh or self.units[base ^ char] & LABEL != char:
                base = self._moved(index, char, fresh)
                self.units[base ^ char], fresh = char, True
            index = base ^ char
        self.units[self._moved(index, 0, fresh)] = place | 1 << 31
        self.units[index] |= LEAF

    def _moved(self, index: int, char: int, fresh: bool) -> int:
        """Give a node, and all that is below it, a base with room for one more byte; a fresh one
        has nothing below.
        """
        old = index ^ _offset(self.units[index])
        below = (
            [] if fresh else [at for at in range(1, BLOCK) if self.units[old ^ at] & LABEL == at]
        )
        if not fresh and self.units[index] & LEAF:
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
        assert base ^ index < REACH, (base, index)
        self.units[index] = self.units[index] & (LABEL | LEAF) | (base ^ index) << 10

    def _base(self, chars: list[int]) -> int:
        """A base that no node has, with free slots for these bytes; they are taken with it."""
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
            self.units += [0] * BLOCK
            for slot in [slot for slot in self.free if slot < first - OPEN * BLOCK]:
                del self.free[slot]  # nothing has fitted there for long
            self.free |= dict.fromkeys(range(first, first + BLOCK))
            yield from range(first, first + BLOCK)


def _packed(array: _Array, texts: _Texts) -> bytes:
    return struct.pack(f"<I{len(array.units)}I", 4 * len(array.units), *array.units) + bytes(
        texts.data
    )


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & WIDE) >> 6)


def _width(lead: int) -> int:
    """Bytes of a character by its first one."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
