"""Files with draft heads: small networks that guess the tokens after the next one from the model's
final hidden state. `llmcli convert --heads` writes them, in a GGUF form of llmcli's own.

- Medusa (Cai et al. 2024): each head has one or more residual blocks, x + SiLU(W x + b), and then
  the model's output matrix or one of its own.
- Blockwise parallel decoding (Stern et al. 2018): one hidden layer for all heads, and then the
  model's output matrix: x + V ReLU(W x + b) + c, with V and c of each head.

Head k, counted from 0, guesses the token k + 2 places after the one whose state it reads; the model
itself predicts the token one place after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmcli.errors import UserError
from llmcli.runtime.drafting.draft_files.vocabulary_match import vocabulary_hash
from quant.gguf.header import TensorInfo
from quant.model_file.load_checks import HEADS_ARCHITECTURE, UNSUPPORTED_TYPES
from quant.model_file.model_header import ModelHeader

MEDUSA, BLOCKWISE = "medusa", "blockwise"
HEAD_METHODS = (MEDUSA, BLOCKWISE)
MAX_HEADS, MAX_LAYERS = 15, 16
# metadata keys after the name of the architecture
METHOD, EMBEDDING, VOCABULARY_SIZE, VOCABULARY_HASH, HEADS, LAYERS = (
    "method",
    "embedding_length",
    "vocab_size",
    "vocab_hash",
    "head_count",
    "block_count",
)


@dataclass(frozen=True, slots=True)
class HeadShapes:
    """The sizes of draft heads. `n_layers`: residual blocks of a Medusa head; 1 for blockwise heads.
    `n_hidden`: size of the hidden layer of blockwise heads; 0 for Medusa. `has_outputs`: whether
    each head has an output matrix of its own.
    """

    method: str
    n_embd: int
    n_vocab: int
    n_heads: int
    n_layers: int
    n_hidden: int
    has_outputs: bool

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names of the tensors in a file with their shapes in ggml's order."""
        found: dict[str, tuple[int, ...]] = {}
        if self.method == BLOCKWISE:
            found |= _layer("hidden", self.n_embd, self.n_hidden)
        for head in range(self.n_heads):
            if self.method == BLOCKWISE:
                found |= _layer(f"head.{head}", self.n_hidden, self.n_embd)
            else:
                for layer in range(self.n_layers):
                    found |= _layer(f"head.{head}.{layer}", self.n_embd, self.n_embd)
            if self.has_outputs:
                found[f"head.{head}.output.weight"] = (self.n_embd, self.n_vocab)
        return found


def _layer(name: str, columns: int, rows: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (columns, rows), f"{name}.bias": (rows,)}


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """The draft heads in a file. `tensors`: by name. `vocabulary`: the hash of the vocabulary of the
    model that they belong to.
    """

    path: Path
    shapes: HeadShapes
    vocabulary: str
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_heads_file(header: ModelHeader) -> bool:
    """Return whether a GGUF has draft heads instead of a model."""
    return header.architecture == HEADS_ARCHITECTURE


def read_heads(header: ModelHeader) -> DraftHeads:
    """Return the draft heads in a file. Raises UserError if it has none, or damaged ones."""
    if not is_heads_file(header):
        raise _invalid(header.path, f"its architecture is {header.architecture}")
    n_embd, n_vocab, n_heads, n_layers = (
        header.get_int(key) or 0 for key in (EMBEDDING, VOCABULARY_SIZE, HEADS, LAYERS)
    )
    method, vocabulary = (
        header.metadata.get(f"{HEADS_ARCHITECTURE}.{key}") for key in (METHOD, VOCABULARY_HASH)
    )
    if not isinstance(method, str) or method not in HEAD_METHODS:
        raise _invalid(header.path, f"its method is {method!r}")
    if not isinstance(vocabulary, str):
        raise _invalid(header.path, "it does not name the vocabulary of its model")
    if not (0 < n_heads <= MAX_HEADS and 0 < n_layers <= MAX_LAYERS):
        raise _invalid(
            header.path,
            f"it has {n_heads} heads of {n_layers} layers (at most {MAX_HEADS} of {MAX_LAYERS})",
        )
    tensors = {tensor.name: tensor for tensor in header.tensors}
    hidden = tensors.get("hidden.bias")
    shapes = HeadShapes(
        method,
        n_embd,
        n_vocab,
        n_heads,
        n_layers,
        hidden.shape[0] if hidden and method == BLOCKWISE else 0,
        "head.0.output.weight" in tensors,
    )
    for name, shape in shapes.tensors().items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            raise _invalid(header.path, f"{name} is missing or not of the shape {list(shape)}")
        if tensor.type in UNSUPPORTED_TYPES or (len(shape) == 1 and tensor.type != "F32"):
            raise _invalid(header.path, f"{name} is stored as {tensor.type}")
    if header.alignment % 32:
        raise _invalid(header.path, f"its weights are aligned to {header.alignment} bytes")
    return DraftHeads(header.path, shapes, vocabulary, tensors)


def require_fitting_heads(model: ModelHeader, heads: DraftHeads) -> None:
    """Raise UserError when draft heads belong to another model than `model`: they have another
    hidden size or vocabulary. Models of the same sizes cannot be told apart.
    """
    shapes, (columns, n_vocab) = heads.shapes, output_matrix(model).shape
    difference = ""
    if shapes.n_embd != columns:
        difference = f"its hidden states have {shapes.n_embd} values, the model's have {columns}"
    elif columns != model_n_embd(model):
        difference = "the model's output matrix does not read its final hidden states"
    elif shapes.n_vocab != n_vocab:
        difference = f"it has {shapes.n_vocab} tokens, but the model has {n_vocab}"
    elif heads.vocabulary != vocabulary_hash(model):
        difference = "its vocabulary is different"
    if difference:
        raise UserError(
            f"{heads.path.name} has draft heads of another model than {model.path.name}: "
            f"{difference}",
            hint="leave out -md, or convert heads of this model: "
            f"llmcli convert '{model.path}' --heads FOLDER",
        )


def model_n_embd(model: ModelHeader) -> int:
    """Return the size of a model's final hidden states; 0 if its header does not have it."""
    return model.get_int("embedding_length_out") or model.get_int("embedding_length") or 0


def output_matrix(model: ModelHeader) -> TensorInfo:
    """Return the matrix with which a model computes logits, `[n_embd, n_vocab]`: the table of token
    embeddings if it has none of its own. Raises UserError if it has neither.
    """
    tensors = {tensor.name: tensor for tensor in model.tensors}
    found = tensors.get("output.weight") or tensors.get("token_embd.weight")
    if found is None or len(found.shape) != 2:
        raise UserError(
            f"{model.path.name} has no output matrix, which draft heads need",
            hint="use another model, or no draft heads",
        )
    return found


def _invalid(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not a valid file of draft heads: {why}",
        hint="convert the heads again: llmcli convert MODEL --heads FOLDER",
    )
