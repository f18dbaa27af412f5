"""Splits the tensors of a model into shards, which are the files of a split model. llama.cpp loads
all of them when it is given the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quant.errors import UserError
from quant.gguf.header import DEFAULT_ALIGNMENT_BYTES
from quant.gguf.layout import encode_entry

MAX_SHARDS = 65535  # split.count is a uint16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """The position of one file in a split model: file `number` (from 0) of `count`. `tensors` is
    the number of tensors in all files together.
    """

    number: int
    count: int
    tensors: int

    @property
    def metadata(self) -> dict[str, bytes]:
        """The metadata entries that llama.cpp needs in every shard, by key."""
        return {
            "split.no": encode_entry("uint16", self.number),
            "split.count": encode_entry("uint16", self.count),
            "split.tensors.count": encode_entry("int32", self.tensors),
        }


def group_tensors(
    tensors: Sequence[T], sizes: Sequence[int], names: Sequence[str], max_bytes: int
) -> list[list[T]]:
    """Return the tensors of each shard, in order, as llama-gguf-split groups them. `sizes`: the
    bytes of each tensor. `max_bytes`: the most bytes of tensors in a shard, padding included.

    Raises UserError if a tensor does not fit into a shard or if there are too many shards.
    """
    groups: list[list[T]] = [[]]
    filled = 0
    for tensor, nbytes, name in zip(tensors, sizes, names, strict=True):
        padded = -(-nbytes // DEFAULT_ALIGNMENT_BYTES) * DEFAULT_ALIGNMENT_BYTES
        if padded > max_bytes:
            raise UserError(
                f"{name} alone takes {padded:,} bytes, more than --split-max-size",
                hint=f"use at least --split-max-size {-(-padded // 1_000_000)}M",
            )
        if filled + padded > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += padded
    if len(groups) > MAX_SHARDS:
        raise UserError(
            f"this makes {len(groups)} shards, and at most {MAX_SHARDS} are possible",
            hint="use a larger --split-max-size",
        )
    return groups


def shard_paths(out: Path, count: int) -> tuple[Path, ...]:
    """Return the paths of `count` shards if the user names `out`: NAME-00001-of-0000N.gguf in the
    same folder.
    """
    stem = out.name.removesuffix(".gguf")
    return tuple(
        out.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    )


def parse_size(text: str, flag: str = "--split-max-size", purpose: str = "a shard") -> int:
    """Return the bytes that "500M" or "2G" stands for, in powers of 1000 as llama-gguf-split
    counts. Raises UserError for any other text; the message names `flag` and `purpose`.
    """
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    if not (
        number.isascii() and number.isdigit() and unit in ("M", "G") and 0 < int(number) < 10**6
    ):
        raise UserError(f"{text!r} is no size of {purpose}", hint=f"for example {flag} 500M, or 2G")
    return int(number) * (10**6 if unit == "M" else 10**9)
