"""Pickled checkpoints (pytorch_model.bin, .pt) as lazy tensors: torch's weights-only unpickler,
mapped.

The only place where torch opens a file. Nothing but tensors and plain containers is unpickled, code
in the file is refused; and only torch's zip format is read, because the older one cannot be mapped.
It knows no names.
"""

import importlib.util
import pickle
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant import tensors
from quant.errors import Pickled, Refusal
from quant.tensors import AGAIN, DTYPES, LazyTensor

if TYPE_CHECKING:
    from quant.native import U8

MAX_PICKLE = (
    64_000_000  # bytes of the pickle itself: it holds names and shapes, the values lie beside it
)
INDEX, SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
ENDINGS = (".bin", ".pt", ".pth")
OTHERS = (
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "scaler",
)  # what trainers leave beside
FOREIGN = ("ggml", "openvino")  # in the names of .bin files that are no pickles at all
SAFE = "use the safetensors of this model"
# What a file made to deceive can raise in the unpickler; the first is its word for "not allowed".
BROKEN = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    EOFError,
    OSError,
    struct.error,
    OverflowError,
    MemoryError,
    zipfile.BadZipFile,
)


def chosen(names: Collection[str]) -> list[str]:
    """Of the names of a folder's files those that hold its pickled weights, an index before its
    shards.

    Where nothing is called as transformers calls it, all that may hold weights; trainers' own files
    never do.
    """
    held = sorted(
        name
        for name in names
        if name.endswith(ENDINGS)
        and not name.startswith(OTHERS)
        and not any(word in name.lower() for word in FOREIGN)
    )
    if INDEX in names:
        return [
            INDEX,
            *(name for name in held if name.startswith("pytorch_model") and name != SINGLE),
        ]
    return [SINGLE] if SINGLE in held else held


def files(folder: Path) -> list[Path]:
    """The files of a folder that hold its pickled weights, and their index."""
    return [
        folder / name for name in chosen([path.name for path in folder.iterdir() if path.is_file()])
    ]


def unasked(where: object, names: Collection[str]) -> Pickled:
    """The error for pickled weights (`names`) that nobody has allowed to read."""
    some = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
    return Pickled(
        f"{where} has pickled weights only ({some}), which are read when you allow it; nothing in them is run",
        hint="add --allow-pickle",
    )


def need_torch() -> None:
    """Refuse where torch is not installed, without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise Refusal(
            "pickled weights are read with torch, which is not installed",
            hint="pip install 'llmcli[torch]'",
        )


def load(folder: Path) -> dict[str, LazyTensor]:
    """All tensors by name: of the shards an index names, of pytorch_model.bin, or of the one file
    there is.
    """
    if (folder / INDEX).is_file():
        return tensors.sharded(folder / INDEX, parse)
    held = files(folder)
    if len(held) != 1:
        raise Refusal(
            f"{folder} has {len(held)} pickled files and no {SINGLE}: {', '.join(file.name for file in held[:3])}",
            hint=f"leave one in the folder, or call the right one {SINGLE}",
        )
    return {tensor.name: tensor for tensor in parse(held[0])}


def parse(file: Path) -> Iterator[LazyTensor]:
    """The tensors of one pickled file; refuses whatever else is in it."""
    values = _unpickled(file)
    if not isinstance(values, dict) or not values:
        raise _bad(file, "it holds no table of tensors")
    if wrong := [repr(name) for name, value in values.items() if not _plain(name, value)]:
        raise _bad(
            file, f"it holds more than tensors in memory order: {', '.join(wrong[:5])[:500]}"
        )
    return (_lazy(file, name, value) for name, value in values.items())


def _unpickled(file: Path) -> Any:
    """What torch's weights-only unpickler makes of the file, its values mapped."""
    need_torch()
    import torch

    _zipped(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about classes of old torch; what is read is checked below
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except BROKEN as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise Refusal(f"{file} is not read: {what[:300]}", hint=SAFE) from None


def _zipped(file: Path) -> None:
    """Refuse what is no zip archive of stored members, or has a pickle of a size that no table of
    names has.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise Refusal(
                f"{file} is in torch's format of before 2020, which cannot be mapped", hint=SAFE
            )
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except BROKEN as error:
        raise _bad(file, str(error)) from None
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise _bad(file, f"{member.filename} is compressed")
        if member.filename.endswith(".pkl") and member.file_size > MAX_PICKLE:
            raise _bad(file, f"{member.filename} claims {member.file_size} bytes")


def _plain(name: Any, value: Any) -> bool:
    """Whether an entry is a dense tensor of a known type under a name that can be written."""
    import torch

    return (
        isinstance(name, str)
        and name.isprintable()
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.is_contiguous()
        and not value.is_neg()
        and value.numel() > 0
        and _dtype(value) in DTYPES
    )


def _dtype(value: Any) -> str:
    """torch's name for a dtype as safetensors has it: torch.float16 -> F16, torch.float8_e4m3fn ->
    F8_E4M3.
    """
    name = str(value.dtype).removeprefix("torch.")
    special = {
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "bool": "BOOL",
    }
    return special.get(name) or name.replace("uint", "U").replace("int", "I").replace("float", "F")


def _lazy(file: Path, name: str, value: Any) -> LazyTensor:
    import torch

    shape = tuple(value.shape) or (1,)
    width = shape[-1]
    flat = value.detach().as_strided(
        (value.numel(),), (1,)
    )  # one of a single column may keep any stride

    def read(first: int, last: int) -> "U8":
        rows: U8 = flat[first * width : last * width].view(torch.uint8).numpy()
        return rows.reshape(last - first, -1)

    return LazyTensor(name, shape, _dtype(value), file, read)


def _bad(file: Path, why: str) -> Refusal:
    return Refusal(f"{file} is not a sound file of pickled weights: {why}", hint=AGAIN)
