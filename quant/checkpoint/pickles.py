"""Pickled checkpoints (pytorch_model.bin, .pt) as lazy tensors, read by torch's weights-only
unpickler.

No other module lets torch open a file. Only tensors and plain containers are unpickled. A file with
anything else is refused, so no code in it is run. Only torch's zip format is read, because the
older format cannot be memory-mapped.
"""

import importlib.util
import pickle
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.checkpoint import safetensors
from quant.checkpoint.folder import REFETCH_HINT, CheckpointFolder
from quant.checkpoint.safetensors import DTYPE_BYTES, LazyTensor
from quant.errors import PickleNotAllowedError, UserError

if TYPE_CHECKING:
    from quant.native.ggml import U8

# Maximum bytes of the pickle in an archive. It contains names and shapes; the values are separate.
MAX_PICKLE_BYTES = 64_000_000
INDEX_FILE, SINGLE_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
PICKLE_ENDINGS = (".bin", ".pt", ".pth")
# Beginnings of the names of other pickled files that trainers save in the same folder.
TRAINER_PREFIXES = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
OTHER_FORMATS = ("ggml", "openvino")  # parts of the names of .bin files in other formats
SAFETENSORS_HINT = "use the safetensors of this model"
# Exceptions that the unpickler raises for malicious or damaged files; UnpicklingError means that
# something in the file is not allowed.
UNPICKLING_ERRORS = (
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


def choose_pickles(names: Collection[str]) -> list[str]:
    """Return those of the file names that contain a folder's pickled weights: an index and its
    shards, or pytorch_model.bin, or else all files that may contain weights.

    Files that trainers save in the same folder, such as optimizer states, are never returned.
    """
    candidates = sorted(
        name
        for name in names
        if name.endswith(PICKLE_ENDINGS)
        and not name.startswith((".", *TRAINER_PREFIXES))
        and not any(word in name.lower() for word in OTHER_FORMATS)
    )
    if INDEX_FILE in names:
        return [
            INDEX_FILE,
            *(
                name
                for name in candidates
                if name.startswith("pytorch_model") and name != SINGLE_FILE
            ),
        ]
    return [SINGLE_FILE] if SINGLE_FILE in candidates else candidates


def find_pickles(folder: Path) -> list[Path]:
    """Return the paths of the files in a folder that choose_pickles() selects."""
    return [
        folder / name
        for name in choose_pickles([path.name for path in folder.iterdir() if path.is_file()])
    ]


def pickles_not_allowed(where: object, names: Collection[str]) -> PickleNotAllowedError:
    """Return the error that `where` (a folder or repository) has only the pickled files `names`,
    which the user has not allowed to be read.
    """
    listed = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
    return PickleNotAllowedError(
        f"{where} has only pickled weights ({listed}), which are read if you allow it; no code in "
        "them is run",
        hint="add --allow-pickle",
    )


def require_torch() -> None:
    """Raise UserError if torch is not installed, without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "pickled weights are read with torch, which is not installed",
            hint="pip install 'llmcli[torch]'",
        )


def load_pickles(folder: CheckpointFolder) -> dict[str, LazyTensor]:
    """Return all tensors of a folder by name, read from the shards of an index, or else from the
    only pickled file.

    Raises UserError if there are several files without an index, or if a file contains anything but
    tensors.
    """
    if folder.has_file(INDEX_FILE):
        return safetensors.load_shards(folder, INDEX_FILE, read_pickle)
    pickles = find_pickles(folder.path)
    if len(pickles) != 1:
        raise UserError(
            f"{folder.path} has {len(pickles)} pickled files and no {SINGLE_FILE}: "
            f"{', '.join(file.name for file in pickles[:3])}",
            hint=f"keep only one in the folder, or rename the right one to {SINGLE_FILE}",
        )
    return {tensor.name: tensor for tensor in read_pickle(pickles[0])}


def read_pickle(file: Path) -> Iterator[LazyTensor]:
    """Yield the tensors of one pickled file.

    Raises UserError if the file contains anything but tensors.
    """
    values = _unpickle(file)
    if not isinstance(values, dict) or not values:
        raise _invalid(file, "it does not hold a table of tensors")
    if wrong := [repr(name) for name, value in values.items() if not _is_plain_tensor(name, value)]:
        raise _invalid(
            file, f"it holds more than tensors in memory order: {', '.join(wrong[:5])[:500]}"
        )
    return (_lazy_tensor(file, name, value) for name, value in values.items())


def _unpickle(file: Path) -> Any:
    """Return what torch's weights-only unpickler reads from the file. The values of tensors are
    memory-mapped.
    """
    require_torch()
    import torch

    _check_archive(file)
    try:
        with warnings.catch_warnings():
            # Files of old torch versions cause warnings about deprecated classes; the content is
            # checked below.
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UNPICKLING_ERRORS as error:
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file} cannot be read: {message[:300]}", hint=SAFETENSORS_HINT) from None


def _check_archive(file: Path) -> None:
    """Raise UserError unless the file is a zip archive of uncompressed members with a pickle of at
    most MAX_PICKLE_BYTES, which is enough for names and shapes.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise UserError(
                f"{file} has torch's format from before 2020, which cannot be mapped",
                hint=SAFETENSORS_HINT,
            )
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except UNPICKLING_ERRORS as error:
        raise _invalid(file, str(error)) from None
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise _invalid(file, f"{member.filename} is compressed")
        if member.filename.endswith(".pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise _invalid(file, f"{member.filename} claims {member.file_size} bytes")


def _is_plain_tensor(name: Any, value: Any) -> bool:
    """Return whether an entry is a usable tensor: dense, contiguous, not empty, of a supported
    dtype and with a printable name.
    """
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
        and _dtype(value) in DTYPE_BYTES
    )


def _dtype(value: Any) -> str:
    """Return the name that safetensors uses for a torch tensor's dtype: torch.float16 -> F16,
    torch.float8_e4m3fn -> F8_E4M3.
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


def _lazy_tensor(file: Path, name: str, value: Any) -> LazyTensor:
    import torch

    shape = tuple(value.shape) or (1,)
    width = shape[-1]
    # A tensor with a single column may have any stride.
    flat = value.detach().as_strided((value.numel(),), (1,))

    def read(first: int, last: int) -> "U8":
        rows: U8 = flat[first * width : last * width].view(torch.uint8).numpy()
        return rows.reshape(last - first, -1)

    return LazyTensor(name, shape, _dtype(value), file, read)


def _invalid(file: Path, why: str) -> UserError:
    return UserError(f"{file} is not a valid file of pickled weights: {why}", hint=REFETCH_HINT)
