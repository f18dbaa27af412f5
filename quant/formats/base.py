"""What a block format is: the fields of its blocks, what number they stand for, and ggml's own encoder.

`pack(unpack(blocks))` is the same bytes; `value` gives what every reader of the file will see, to the last bit.
A format is arithmetic on arrays of blocks; it knows no rows and no tensors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant import native

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quant.native import F32, U8

    F16 = NDArray[np.float16]
    I16 = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of many blocks.

    `codes` [blocks, values] as stored, from 0 up (Q8_0: signed); `d` [blocks] is the scale of a block, `m` [blocks]
    the scale of its minimums or the minimum itself; `scales` and `mins` [blocks, groups] are the whole numbers that
    d and m are multiplied with, group by group. None where the format has no such field.
    """

    codes: "I16"
    d: "F16"
    m: "F16 | None" = None
    scales: "I16 | None" = None
    mins: "I16 | None" = None


class Format(ABC):
    """A block format. A leaf gives `name`, `unpack` and `pack`, and where codes are not from 0 up, `levels`."""

    name: str

    @abstractmethod
    def unpack(self, blocks: "U8") -> Fields:
        """Take blocks [blocks, bytes] apart."""

    @abstractmethod
    def pack(self, fields: Fields) -> "U8":
        """Put blocks [blocks, bytes] together."""

    def levels(self, codes: "I16") -> "F32":
        """What codes count, in steps of the scale."""
        import numpy as np

        return codes.astype(np.float32)

    def value(self, fields: Fields) -> "F32":
        """The numbers [blocks, values] that the blocks stand for, rounded as ggml rounds them."""
        import numpy as np

        count = len(fields.codes)
        step = fields.d.astype(np.float32)[:, None]
        if fields.scales is not None:
            step = step * fields.scales.astype(np.float32)  # [blocks, groups]
        numbers: F32 = step[:, :, None] * self.levels(fields.codes).reshape(count, step.shape[1], -1)
        if fields.m is not None:
            least = fields.m.astype(np.float32)[:, None]
            if fields.mins is None:
                numbers = numbers + least[:, :, None]
            else:
                numbers = numbers - (least * fields.mins.astype(np.float32))[:, :, None]
        return numbers.reshape(count, -1)

    def encode(self, values: "F32", *, importance: "F32 | None" = None) -> "U8":
        """ggml's own choice for values [blocks, values], each column weighed by `importance` [values]."""
        weights = None if importance is None else native.Importance(importance[None], max(1, len(values)))
        return native.encode(values, self.name, label=self.name, importance=weights)

    def decode(self, blocks: "U8") -> "F32":
        """ggml's own reading of blocks [blocks, bytes]."""
        return native.decode(blocks, self.name, native.block(self.name).values, label=self.name)


def planes(stored: "U8", bits: int) -> "I16":
    """Fields of `bits` bits [..., bytes] -> [..., 8 / bits, bytes]: the lowest bits of all bytes come first."""
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((stored[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)).astype(np.int16)


def merged(codes: "I16", bits: int) -> "U8":
    """The reverse of planes(): [..., 8 / bits, bytes] -> [..., bytes]."""
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    stored: U8 = np.bitwise_or.reduce(codes.astype(np.uint8) << shifts, axis=-2)
    return stored


def halves(stored: "U8") -> "F16":
    """Two bytes [blocks, 2] -> one float [blocks]."""
    import numpy as np

    return np.ascontiguousarray(stored).view(np.float16)[:, 0]


def stored_halves(values: "F16 | None") -> "U8":
    """Floats [blocks] -> bytes [blocks, 2]."""
    import numpy as np

    assert values is not None
    return np.ascontiguousarray(values, np.float16).view(np.uint8).reshape(-1, 2)


def joined(*parts: "U8") -> "U8":
    """Fields [blocks, …] one behind the other, as bytes [blocks, bytes]."""
    import numpy as np

    return np.concatenate([part.astype(np.uint8).reshape(len(part), -1) for part in parts], axis=1)
