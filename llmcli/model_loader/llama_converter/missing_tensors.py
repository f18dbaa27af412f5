"""Adds tensors to an mmproj file that llama.cpp needs to load it and its converter leaves out: rows of
the language part's embedding.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.atomic_files import write_error
from llmcli.catalog.disk_space import require_free_space
from llmcli.errors import UserError
from quant.certificate.certificate import read_blocks
from quant.checkpoint.folder import CheckpointFolder
from quant.checkpoint.safetensors import load_tensors
from quant.checkpoint.tensor_views import read_floats, row_count
from quant.gguf.header import read_file_header
from quant.gguf.layout import lay_out_file

if TYPE_CHECKING:
    from quant.model_file.model_header import ModelHeader
    from quant.native.ggml import F32

# For each kind of projector the needed tensor (clip.cpp), and the token whose row it is.
NEEDED_TENSORS = {"pixtral": ("v.token_embd.img_break", "[IMG_BREAK]")}
EMBEDDING_ENDING = "embed_tokens.weight"


def read_missing_tensors(folder: Path, header: "ModelHeader") -> "dict[str, F32]":
    """Return the tensors by name that llama.cpp needs besides those in the header of an mmproj file,
    as float32 vectors. `folder`: the checkpoint from which the file is made.

    Raises UserError if the checkpoint does not have them.
    """
    needed = NEEDED_TENSORS.get(str(header.metadata.get("clip.projector_type")))
    if needed is None or needed[0] in {tensor.name for tensor in header.tensors}:
        return {}
    name, token = needed
    row = _read_row(CheckpointFolder(folder), token)
    if row is None:
        raise UserError(
            f"llama.cpp's converter leaves out {name}, without which llama.cpp does not load the "
            f"vision part, and {folder} has no embedding of {token} that could be it",
            hint="leave out --mmproj, and pull an mmproj file of this model instead",
        )
    return {name: row}


def _read_row(folder: CheckpointFolder, token: str) -> "F32 | None":
    """Return a token's row of the language part's embedding, or None if there is none."""
    number = _find_token(folder, token)
    embeddings = [
        tensor
        for name, tensor in load_tensors(folder).items()
        if name.endswith(EMBEDDING_ENDING) and len(tensor.shape) == 2
    ]
    if number is None or len(embeddings) != 1 or not 0 <= number < row_count(embeddings[0]):
        return None
    return read_floats(embeddings[0], number, number + 1).reshape(-1)


def _find_token(folder: CheckpointFolder, token: str) -> int | None:
    """Return the number of a special token in a checkpoint's tokenizer, or None if it has none with
    this text.
    """
    decoder = folder.read_optional_json("tokenizer_config.json").get("added_tokens_decoder")
    added = folder.read_optional_json("tokenizer.json").get("added_tokens")
    entries = [
        *(decoder.items() if isinstance(decoder, dict) else ()),
        *((entry.get("id"), entry) for entry in added or () if isinstance(entry, dict)),
    ]
    for number, entry in entries:
        if isinstance(entry, dict) and entry.get("content") == token and str(number).isdecimal():
            return int(number)
    return None


def add_tensors(file: Path, added: "Mapping[str, F32]") -> None:
    """Write float32 vectors behind the tensors of a GGUF. A new file replaces the old one.

    Raises UserError if the disk has too little space.
    """
    header = read_file_header(file)
    entries = [(field.key, field.read_raw()) for field in header.fields]
    layout = lay_out_file(
        entries,
        [(tensor.name, tensor.shape, tensor.type) for tensor in header.tensors]
        + [(name, (len(values),), "F32") for name, values in added.items()],
        header.alignment,
    )
    require_free_space(layout.nbytes, file)
    part = file.with_name(f"{file.name}.part")
    try:
        with file.open("rb") as source, part.open("wb") as out:
            out.write(layout.header)
            for tensor, slot in zip(header.tensors, layout.slots, strict=False):
                out.write(bytes(slot.offset - out.tell()))
                for block in read_blocks(source, tensor):
                    out.write(block)
            for values, slot in zip(
                added.values(), layout.slots[len(header.tensors) :], strict=True
            ):
                out.write(bytes(slot.offset - out.tell()))
                out.write(values.astype("<f4").tobytes())
            out.write(bytes(layout.nbytes - out.tell()))
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise write_error(file, error) from None
