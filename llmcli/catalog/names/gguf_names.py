"""Says by its name whether a GGUF contains a language model, or what a model needs in addition."""

import re

from llmcli.catalog.names.shard_names import parse_shard_name

# Files that llama.cpp loads in addition to a model: projectors for images or sound, whose names
# contain "mmproj", and draft heads, whose names begin with their kind.
PROJECTOR = "mmproj"
DRAFT_HEADS = ("mtp", "eagle3", "dflash", "dspark")
COMPANION_KINDS = (PROJECTOR, *DRAFT_HEADS)
# An importance matrix. A model that was quantized with one has its type in the name, too.
IMATRIX_ENDING = re.compile(r"[-._]imatrix$", re.IGNORECASE)
TYPE_WORD = re.compile(r"[-._](I?Q\d_\w+|TQ\d_0|(?:MX|NV)FP4\w*|B?F16|F32)([-._]|$)", re.IGNORECASE)


def is_model_name(path: str) -> bool:
    """Return whether a file is a GGUF with a language model, or the first shard of one. Not counted
    are hidden files, such as those that macOS writes next to every file (`._NAME`), projectors for
    images (mmproj), draft heads and importance matrices.
    """
    name = path.rpartition("/")[2]
    lower, shard = name.lower(), parse_shard_name(name)
    if not lower.endswith(".gguf") or name.startswith(".") or (shard and shard.number != 1):
        return False
    if companion_kind(name) or lower.startswith("imatrix"):
        return False
    stem = shard.stem if shard else name[: -len(".gguf")]
    return not IMATRIX_ENDING.search(stem) or TYPE_WORD.search(stem) is not None


def companion_kind(path: str) -> str | None:
    """Return which of COMPANION_KINDS a GGUF is by its name; None if it is none of them."""
    name = path.rpartition("/")[2].lower()
    if not name.endswith(".gguf") or name.startswith("."):
        return None
    if PROJECTOR in name:
        return PROJECTOR
    return next((kind for kind in DRAFT_HEADS if name.startswith(f"{kind}-")), None)
