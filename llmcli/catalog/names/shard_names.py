"""Parses the file names of the shards of a split GGUF, such as STEM-00001-of-00003.gguf."""

import re
from dataclasses import dataclass

SHARD_PATTERN = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ShardName:
    """The parsed name of a shard: `number` (from 1) of `count` shards of the model `stem`."""

    stem: str
    number: int
    count: int

    @property
    def all_names(self) -> list[str]:
        """The file names of all shards of the model, in order."""
        return [
            f"{self.stem}-{number:05}-of-{self.count:05}.gguf"
            for number in range(1, self.count + 1)
        ]


def parse_shard_name(name: str) -> ShardName | None:
    """Parse the file name of a shard. Return None if `name` is not such a name."""
    match = SHARD_PATTERN.fullmatch(name)
    if not match or not int(match[3]):
        return None
    return ShardName(match[1], int(match[2]), int(match[3]))
