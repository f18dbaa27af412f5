"""The metadata and the tensor table of a GGUF language model, collected from all its shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quant.gguf.header import GgufArray, MetadataField, MetadataValue, TensorInfo
from quant.recipes.file_types import FILE_TYPES

GUESSED_FLAG = 1024  # LLAMA_FTYPE_GUESSED in llama.h

FILE_TYPE_LABELS: dict[int, str] = {kind.number: kind.name for kind in FILE_TYPES.values()}


def tensor_role(name: str) -> str:
    """Return a GGUF tensor's role: its name without the block number and the ending.
    "blk.3.attn_q.weight" gives "attn_q", "output_norm.weight" gives "output_norm".
    """
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" and len(parts) > 2 else parts[0]


@dataclass(frozen=True)
class ModelHeader:
    """The metadata and the tensor table of a GGUF model, collected from all its shards.

    `files` are the paths of the shards. `fields` are those of the first shard. `alignment` is in
    bytes.
    """

    path: Path
    files: tuple[Path, ...]
    version: int
    fields: tuple[MetadataField, ...]
    tensors: tuple[TensorInfo, ...]
    alignment: int

    @cached_property
    def metadata(self) -> Mapping[str, MetadataValue]:
        """The metadata values by key. Arrays stay in the file until they are read."""
        return {field.key: field.value for field in self.fields}

    @property
    def architecture(self) -> str:
        """The value of `general.architecture` ("llama"), or "unknown" if it is missing."""
        return self._text("general.architecture") or "unknown"

    @property
    def name(self) -> str:
        """The value of `general.name`, or the file's name without its ending if it is missing."""
        return self._text("general.name") or self.path.stem

    @property
    def parameters(self) -> int:
        """The number of values in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per value; 0 for a file without tensors."""
        return self.tensor_bytes * 8 / self.parameters if self.tensors else 0.0

    @property
    def file_type(self) -> str:
        """The label of `general.file_type` ("Q4_K_M"), or "unknown". MXFP4 and MXFP4_MOE have the
        same number; in an MXFP4_MOE file only stacks of experts are MXFP4.
        """
        value = self.metadata.get("general.file_type")
        if not isinstance(value, int):
            return "unknown"
        label = FILE_TYPE_LABELS.get(value & ~GUESSED_FLAG, "unknown")
        if label == "MXFP4_MOE" and any(
            tensor.type == "MXFP4" and len(tensor.shape) < 3 for tensor in self.tensors
        ):
            return "MXFP4"
        return label

    @property
    def context_length(self) -> int:
        """Number of tokens in the context that the model was trained for; 0 if the file does not
        record it.
        """
        return self.get_int("context_length") or 0

    @property
    def tokenizer(self) -> str:
        """The kind of tokenizer (`tokenizer.ggml.model`): "llama" (SentencePiece), "gpt2"
        (byte-level BPE), ..., or "none" if it is missing.
        """
        return self._text("tokenizer.ggml.model") or "none"

    @property
    def has_template(self) -> bool:
        """Whether the file has a chat template; base models have none."""
        return bool(self.chat_template)

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template; "" if the file has none, or a value that is no
        text.
        """
        return self._text("tokenizer.chat_template")

    @property
    def has_latent_attention(self) -> bool:
        """Whether llama.cpp caches compressed keys and values for this model (DeepSeek's MLA)."""
        return any(tensor.name.endswith(".attn_k_b.weight") for tensor in self.tensors)

    @property
    def type_totals(self) -> dict[str, tuple[int, int]]:
        """For each tensor type ("Q4_K"), the number of its tensors and their bytes, in order of
        first appearance.
        """
        totals: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            count, nbytes = totals.get(tensor.type, (0, 0))
            totals[tensor.type] = (count + 1, nbytes + tensor.nbytes)
        return totals

    @property
    def tensors_by_role(self) -> dict[str, list[TensorInfo]]:
        """The tensors of all blocks by role ("attn_q", "token_embd"), in order of first
        appearance.
        """
        table: dict[str, list[TensorInfo]] = {}
        for tensor in self.tensors:
            table.setdefault(tensor_role(tensor.name), []).append(tensor)
        return table

    @property
    def max_positions(self) -> int | None:
        """The number of positions for which the model has learned embeddings, as GPT-2 has. llama.cpp
        aborts at a later position. None for a model without them.
        """
        table = (tensor for tensor in self.tensors if tensor.name == "position_embd.weight")
        return next((tensor.shape[1] for tensor in table if len(tensor.shape) == 2), None)

    def get_int(self, key: str) -> int | None:
        """Return the integer under an architecture's key: get_int("block_count") reads
        "llama.block_count". Return None if it is missing.

        If the value is a list with a number for each layer, return the first number.
        """
        value = self.metadata.get(f"{self.architecture}.{key}")
        if (
            isinstance(value, GgufArray)
            and value.kind not in ("string", "float32", "float64")
            and value.count
        ):
            value = value.head(1).read_values()[0]
        return value if isinstance(value, int) else None

    def _text(self, key: str) -> str:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""
