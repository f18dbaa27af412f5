"""Checks whether the file of an EAGLE-3 draft can draft for a model. llama.cpp aborts the process
where it cannot.
"""

from collections.abc import Iterator

from llmcli.errors import UserError
from llmcli.runtime.drafting.draft_files.vocabulary_match import TOKENS_KEY, describe_difference
from quant.gguf.header import GgufArray, TensorInfo
from quant.model_file.model_header import ModelHeader

EAGLE3 = "eagle3"  # the architecture of the files
N_LAYERS_READ = 3
# Architectures whose graph in llama.cpp gives the inputs of its layers (t_layer_inp of src/models),
# and those among them that also give the state after the last layer
FINAL_STATE_ARCHITECTURES = frozenset(
    [
        "bailingmoe3",
        "gemma4",
        "gpt-oss",
        "mimo2",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
    ]
)
TARGET_ARCHITECTURES = FINAL_STATE_ARCHITECTURES | {
    "hunyuan-dense",
    "hunyuan_vl",
    "lfm2",
    "lfm2moe",
    "llama",
    "minimax-01",
    "minimax-m2",
    "muse-glimmer",
    "nanbeige",
    "qwen3",
    "qwen3moe",
}


def is_eagle3(header: ModelHeader) -> bool:
    """Return whether a file is an EAGLE-3 draft."""
    return header.architecture == EAGLE3


def count_layers(header: ModelHeader) -> int:
    """Return the number of layers of a model without those that predict further tokens."""
    return (header.get_int("block_count") or 0) - (header.get_int("nextn_predict_layers") or 0)


def read_layers(draft: ModelHeader) -> list[int]:
    """Return the numbers of the target's layers whose inputs a draft reads; empty if the file does
    not have them.
    """
    value = draft.metadata.get(f"{EAGLE3}.target_layers")
    if not isinstance(value, GgufArray) or value.kind == "string" or value.count > 16:
        return []
    return [number for number in value.read_values() if isinstance(number, int)]


def require_eagle3_match(
    model: ModelHeader, draft: ModelHeader, *, has_weights: bool = True
) -> None:
    """Raise UserError if an EAGLE-3 draft is damaged, or was made for another model. `has_weights`:
    whether the file of the draft has more than its header.
    """
    if model.architecture not in TARGET_ARCHITECTURES:
        raise UserError(
            f"llama.cpp gives no EAGLE-3 draft the layers of a model of architecture "
            f"{model.architecture}",
            hint="leave out --model-draft",
        )
    if problem := next(_problems(draft, has_weights), None):
        raise UserError(
            f"{draft.path.name} would crash llama.cpp: {problem}",
            hint="fetch or convert the file again",
        )
    if difference := next(_differences(model, draft), None):
        raise UserError(
            f"{draft.path.name} is not an EAGLE-3 draft for {model.path.name}: {difference}",
            hint="--model-draft takes the draft that was trained on this model",
        )


def _differences(model: ModelHeader, draft: ModelHeader) -> Iterator[str]:
    """Yield what says that a draft was made for another model."""
    width, n_layers = model.get_int("embedding_length"), count_layers(model)
    target_width = draft.get_int("target_hidden_size")
    if target_width != width:
        yield f"it reads hidden states of {target_width} numbers, but the model has {width}"
    last = max(read_layers(draft))
    if last > n_layers:
        yield f"it reads layer {last}, but the model has {n_layers} layers"
    elif last == n_layers and model.architecture not in FINAL_STATE_ARCHITECTURES:
        yield f"it reads the state after layer {last - 1}, which {model.architecture} does not give"
    if difference := describe_difference(model, draft):
        yield f"its vocabulary is different: {difference}"
    tensors = _tensors(draft)
    own_width = draft.get_int("embedding_length")
    for name, words in (("token_embd.weight", "embeddings of tokens"), ("output.weight", "output")):
        if name not in tensors and own_width != width:
            yield f"it has no {words}, and a width of {own_width} instead of {width}"


def _problems(draft: ModelHeader, has_weights: bool) -> Iterator[str]:
    """Yield what llama.cpp would abort at."""
    layers = read_layers(draft)
    if len(layers) != N_LAYERS_READ or min(layers) < 0:
        yield f"it reads the layers {layers} instead of {N_LAYERS_READ} layers"
    if draft.get_int("block_count") != 1:
        yield f"it has {draft.get_int('block_count')} layers instead of one"
    tokens = draft.metadata.get(TOKENS_KEY)
    n_vocab = tokens.count if isinstance(tokens, GgufArray) else 0
    if not n_vocab:
        yield "it has no vocabulary"
    tensors = _tensors(draft)
    embeddings = tensors.get("token_embd.weight")
    if embeddings and embeddings.rows < n_vocab:
        yield f"it has embeddings of {embeddings.rows} tokens instead of {n_vocab}"
    if token_map := tensors.get("d2t"):
        n_rows = token_map.elements
        if token_map.type != "I64" or len(token_map.shape) != 1:
            yield f"d2t is stored as {token_map.type} in {len(token_map.shape)} dimensions"
        elif has_weights:
            yield from _token_map_problems(token_map, n_vocab)
        if "output.weight" not in tensors and n_rows != n_vocab:
            yield f"d2t has {n_rows} tokens instead of {n_vocab}"


def _token_map_problems(tensor: TensorInfo, n_vocab: int) -> Iterator[str]:
    """Yield the problems with d2t, which has the token of each row of the output."""
    import numpy as np

    tokens = np.fromfile(tensor.file, "<i8", tensor.elements, offset=tensor.offset)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab:
        yield f"d2t names tokens outside the vocabulary of {n_vocab}"
    if len(np.unique(tokens)) != len(tokens):
        yield "d2t names a token twice"


def _tensors(header: ModelHeader) -> dict[str, TensorInfo]:
    return {tensor.name: tensor for tensor in header.tensors}
