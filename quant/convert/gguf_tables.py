"""Names of architectures and tensors: the tables of the gguf package, and the rows that it lacks.

llama.cpp's own copy of the package (gguf-py/gguf/constants.py) has rows that its last release, on
the package index, lacks. The rows that the families of `archs` need are here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Kinds of tensors of a layer that predicts further tokens (MTP), as MODEL_TENSOR names.
PREDICTION_TENSORS = (
    "NEXTN_EH_PROJ",
    "NEXTN_EMBED_TOKENS",
    "NEXTN_ENORM",
    "NEXTN_HNORM",
    "NEXTN_SHARED_HEAD_HEAD",
    "NEXTN_SHARED_HEAD_NORM",
)


@dataclass(frozen=True, slots=True)
class NewArchitecture:
    """An architecture that the package lacks: llama.cpp's name of it, and the MODEL_ARCH name of a
    known architecture that has the same kinds of tensors.
    """

    name: str
    like: str


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A kind of tensor that the package lacks: its GGUF name and its names in checkpoints, both
    without the ending ".weight" or ".bias". "{bid}" stands for the number of the block.
    """

    name: str
    checkpoint_names: tuple[str, ...] = ()


# MODEL_ARCH name -> row
NEW_ARCHITECTURES: Mapping[str, NewArchitecture] = {
    "DEEPSEEK32": NewArchitecture("deepseek32", like="GLM_DSA"),
}
# MODEL_TENSOR name -> row
NEW_TENSORS: Mapping[str, NewTensor] = {}
# MODEL_ARCH name -> names of the kinds of tensors (MODEL_TENSOR or NEW_TENSORS) that the package
# does not list for this architecture
ADDED_TENSORS: Mapping[str, tuple[str, ...]] = {
    "DEEPSEEK2": PREDICTION_TENSORS,
    "EXAONE4": PREDICTION_TENSORS,
    "GEMMA4": ("FFN_GATE_EXP", "FFN_UP_EXP"),
    "MIMO2": (*PREDICTION_TENSORS, "LAYER_OUT_NORM"),
    "NEMOTRON_H_MOE": (
        "ATTN_POST_NORM",
        "NEXTN_EH_PROJ",
        "NEXTN_ENORM",
        "NEXTN_HNORM",
        "NEXTN_SHARED_HEAD_NORM",
    ),
    "QWEN35": PREDICTION_TENSORS,
    "QWEN35MOE": PREDICTION_TENSORS,
    "QWEN3NEXT": PREDICTION_TENSORS,
    "STEP35": PREDICTION_TENSORS,
}

NameFinder = Callable[[str], str | None]


def architecture_name(kind: str) -> str:
    """Return llama.cpp's name of an architecture, such as "qwen35" for the MODEL_ARCH "QWEN35".

    Raises KeyError if neither the package nor this module knows it.
    """
    import gguf

    if kind in NEW_ARCHITECTURES:
        return NEW_ARCHITECTURES[kind].name
    return str(gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind]])


def tensor_names(kind: str) -> frozenset[str]:
    """Return the GGUF names of all tensors of an architecture, without ".weight" and ".bias", with
    "{bid}" for the number of the block. Raises KeyError for an unknown architecture.
    """
    return frozenset(row.name for row in _tensor_rows(kind))


def find_names(kind: str, block_count: int) -> NameFinder:
    """Return a function that returns the GGUF name of a checkpoint's tensor, or None if the
    architecture has no such tensor. Both names end in ".weight" or ".bias", or neither does.

    It agrees with TensorNameMap of the gguf package. Raises KeyError for an unknown architecture.
    """
    names: dict[str, str] = {}
    for row in _tensor_rows(kind):
        is_in_blocks = any("{bid}" in name for name in (row.name, *row.checkpoint_names))
        for block in range(block_count if is_in_blocks else 1):
            for name in (row.name, *row.checkpoint_names):
                names[name.format(bid=block)] = row.name.format(bid=block)
    return lambda name: _look_up(names, name)


def _look_up(names: Mapping[str, str], name: str) -> str | None:
    """Return the GGUF name of a tensor whose name may have an ending that `names` does not have."""
    if name in names:
        return names[name]
    for ending in (".weight", ".bias"):
        if name.endswith(ending) and (stem := name.removesuffix(ending)) in names:
            return names[stem] + ending
    return None


def _tensor_rows(kind: str) -> list[NewTensor]:
    """Return the kinds of tensors of an architecture, in the order of the package's name map."""
    import gguf

    row = NEW_ARCHITECTURES.get(kind)
    arch = gguf.MODEL_ARCH[row.like if row else kind]
    added = ADDED_TENSORS.get(kind, ())
    kinds = {
        *gguf.MODEL_TENSORS[arch],
        *(gguf.MODEL_TENSOR[name] for name in added if name not in NEW_TENSORS),
    }
    tables = gguf.TensorNameMap
    mapped = [
        *tables.mappings_cfg.items(),
        *(tables.block_mappings_cfg | tables.arch_block_mappings_cfg.get(arch, {})).items(),
    ]
    # Some tensors have no name in checkpoints.
    mapped += [(tensor, ()) for tensor in kinds - {tensor for tensor, _ in mapped}]
    return [
        *(
            NewTensor(gguf.TENSOR_NAMES[tensor], names)
            for tensor, names in mapped
            if tensor in kinds
        ),
        *(NEW_TENSORS[name] for name in added if name in NEW_TENSORS),
    ]
