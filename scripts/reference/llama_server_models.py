"""Shared: stand-ins for the models that llama-server's tests download.

They are small and made here: stories260K from the test data of this checkout, and random models with
the vocabularies that lie in llama.cpp's source. The tests check numbers of tokens, which depend on
the vocabulary, and a few words of stories260K.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from scripts.fuzz.files import convert_stories

HIDDEN, LAYERS, HEADS, FF, CONTEXT = 64, 2, 4, 128, 512
RERANK_SEEDS = range(2000)
QUERY = "Machine learning is"


def make_models(folder: Path, llama_cpp: Path) -> None:
    """Write all stand-ins that are missing to `folder`. `llama_cpp`: llama.cpp's source."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = llama_cpp / "models" / "ggml-vocab-bert-bge.gguf"
    makers: dict[str, Callable[[Path], object]] = {
        "stories260K": lambda path: convert_stories(path, "F32"),
        "stories260K-infill": _make_infill,
        "bert-bge-small": lambda path: _make_bert(path, vocabulary, 0),
        "reranker": lambda path: _make_reranker(path, vocabulary),
        "tinygemma3": _make_gemma,
    }
    for name, make in makers.items():
        path = folder / f"{name}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            make(part)
            part.rename(path)


def _make_infill(path: Path) -> None:
    """Write stories260K with three of its rare tokens as the tokens around a gap."""
    plain = path.with_suffix(".plain")
    convert_stories(plain, "F32")
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(path, "llama")
    _copy_metadata(reader, writer, skip=("general.architecture",))
    last = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_uint32(gguf.Keys.Tokenizer.FIM_PRE_ID, last - 1)
    writer.add_uint32(gguf.Keys.Tokenizer.FIM_SUF_ID, last - 2)
    writer.add_uint32(gguf.Keys.Tokenizer.FIM_MID_ID, last - 3)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _finish(writer)
    plain.unlink()


def _make_gemma(path: Path) -> None:
    """Write a random Gemma 3 of text only, with the vocabulary of stories260K."""
    stories = path.with_suffix(".plain")
    convert_stories(stories, "F32")
    reader = gguf.GGUFReader(stories)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_value_length(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(512)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(0)
    _copy_metadata(reader, writer, only="tokenizer.")
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = (HIDDEN,)
        for name in ("attn_q_norm", "attn_k_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = (HIDDEN // HEADS,)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"blk.{layer}.ffn_gate.weight"] = shapes[f"blk.{layer}.ffn_up.weight"] = (FF, HIDDEN)
        shapes[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, FF)
    for name, shape in shapes.items():
        writer.add_tensor(name, _random(random, name, shape))
    _finish(writer)
    stories.unlink()


def _make_bert(path: Path, vocabulary: Path, seed: int, *, has_head: bool = False) -> None:
    """Write a random BERT with the vocabulary of a file. `has_head`: it scores pairs of texts."""
    reader = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_file_type(0)
    writer.add_pooling_type(gguf.PoolingType.RANK if has_head else gguf.PoolingType.CLS)
    _copy_metadata(reader, writer, only="tokenizer.")
    types = reader.fields.get("tokenizer.ggml.token_type_count")
    if types is None:
        writer.add_token_type_count(2)
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, HIDDEN),
        "position_embd.weight": (CONTEXT, HIDDEN),
        "token_types.weight": (2, HIDDEN),
        "token_embd_norm.weight": (HIDDEN,),
        "token_embd_norm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN, HIDDEN),
            "attn_v": (HIDDEN, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_up": (FF, HIDDEN),
            "ffn_down": (HIDDEN, FF),
            "attn_output_norm": (HIDDEN,),
            "layer_output_norm": (HIDDEN,),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
            shapes[f"blk.{layer}.{name}.bias"] = shape[:1]
    if has_head:
        shapes |= {
            "cls.weight": (HIDDEN, HIDDEN),
            "cls.bias": (HIDDEN,),
            "cls.output.weight": (1, HIDDEN),
            "cls.output.bias": (1,),
        }
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(name, _random(random, name, shape))
    _finish(writer)


def _make_reranker(path: Path, vocabulary: Path) -> None:
    """Write a random reranker whose scores happen to be ordered as the tests expect: the third of
    their documents is the best, the last one the worst.
    """
    for seed in RERANK_SEEDS:
        _make_bert(path, vocabulary, seed, has_head=True)
        scores = _scores(path)
        if int(np.argmax(scores)) == 2 and int(np.argmin(scores)) == 3:
            return
    raise SystemExit("no seed gives a reranker that orders the documents of the tests")


def _scores(path: Path) -> list[float]:
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.runtime.runner import open_runner

    options = RunOptions(ctx_size=CONTEXT, threads=1)
    with open_runner(path, options, native_sampling=False, needs_text=False) as runner:
        embedder = runner.embedder()
        job = embedder.start_job([embedder.encode_pair(QUERY, text) for text in DOCUMENTS])
        while job.step():
            pass
        return [float(vector[0]) for vector in job.vectors]


# the documents of unit/test_rerank.py
DOCUMENTS = (
    "A machine is a physical system that uses power to apply forces and control movement to perform "
    "an action. The term is commonly applied to artificial devices, such as those employing engines "
    "or motors, but also to natural biological macromolecules, such as molecular machines.",
    "Learning is the process of acquiring new understanding, knowledge, behaviors, skills, values, "
    "attitudes, and preferences. The ability to learn is possessed by humans, non-human animals, and "
    "some machines; there is also evidence for some kind of learning in certain plants.",
    "Machine learning is a field of study in artificial intelligence concerned with the development "
    "and study of statistical algorithms that can learn from data and generalize to unseen data, and "
    "thus perform tasks without explicit instructions.",
    "Paris, capitale de la France, est une grande ville européenne et un centre mondial de l'art, de "
    "la mode, de la gastronomie et de la culture. Son paysage urbain du XIXe siècle est traversé par "
    "de larges boulevards et la Seine.",
)


def _random(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    is_norm = "norm" in name and name.endswith("weight")
    scale = 0.1 if is_norm or name.endswith("bias") else 0.3
    return random.normal(1.0 if is_norm else 0.0, scale, shape).astype(np.float32)


def _copy_metadata(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, only: str = "", skip: tuple[str, ...] = ()
) -> None:
    """Copy the metadata whose keys begin with `only`, except `skip`."""
    for field in reader.fields.values():
        name = field.name
        if name.startswith("GGUF.") or not name.startswith(only) or name in skip:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
