#!/usr/bin/env python3
"""Train a small Llama on local texts, as a full-precision reference model for quantization.

usage: .venv/bin/python scripts/quality/train_teacher.py FOLDER --text TEXTS
       [--set library|packages] [--hidden 512] [--layers 4] [--steps 1500] [--device cpu|cuda|mps]

Quantization methods are compared by how much the logits of a file differ from the original's, which
needs trained weights; random ones show nothing. The rows of all matrices are multiples of 256, so
that they fill k-quants' superblocks. TEXTS is a folder with wiki.valid.tokens and
tinyshakespeare.txt; --set chooses the other texts (teacher_text.py). The last tenth of each text is
held out and written to FOLDER/text, as are calibration texts from the training part. FOLDER becomes a Hugging
Face checkpoint (config.json, model.safetensors, tokenizer.json) for `llmcli convert`.

The same arguments give the same batches in the same order. A run that was stopped resumes from
FOLDER/checkpoint.pt, which is written every minute. The learning rate is constant until the last
fifth of the steps, where it falls to zero. So a run can be shortened: stop it and start it with
fewer --steps. Weights are stored in float32, and products are computed in --type; --type and the
kind of processor change the result.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from scripts.quality import teacher_text

if TYPE_CHECKING:
    import torch

HEAD = 64  # values of an attention head
FALL_SHARE = 0.2  # share of the steps in which the learning rate falls and the context is doubled
WARMUP = 50  # steps
CHECKPOINT_SECONDS = 60.0  # seconds between checkpoints
EPSILON = 1e-5  # of the RMS norms
ROPE_BASE = 10000.0  # base of the rotary position embedding


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: hidden and feed-forward size, blocks, vocabulary, and the training
    context in tokens.
    """

    hidden: int
    ffn: int
    layers: int
    n_vocab: int
    ctx: int

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.hidden // HEAD

    @property
    def kv(self) -> int:
        """The number of key and value heads, half the number of query heads."""
        return self.heads // 2

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name in Hugging Face's Llama. There is no output
        head, because it is tied to the embedding.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.n_vocab, self.hidden)
        }
        for block in range(self.layers):
            prefix, wide, narrow = f"model.layers.{block}", self.hidden, self.kv * HEAD
            shapes |= {
                f"{prefix}.input_layernorm.weight": (wide,),
                f"{prefix}.self_attn.q_proj.weight": (wide, wide),
                f"{prefix}.self_attn.k_proj.weight": (narrow, wide),
                f"{prefix}.self_attn.v_proj.weight": (narrow, wide),
                f"{prefix}.self_attn.o_proj.weight": (wide, wide),
                f"{prefix}.post_attention_layernorm.weight": (wide,),
                f"{prefix}.mlp.gate_proj.weight": (self.ffn, wide),
                f"{prefix}.mlp.up_proj.weight": (self.ffn, wide),
                f"{prefix}.mlp.down_proj.weight": (wide, self.ffn),
            }
        return shapes | {"model.norm.weight": (self.hidden,)}

    def config(self) -> dict[str, object]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "head_dim": HEAD,
            "vocab_size": self.n_vocab,
            "max_position_embeddings": 2 * self.ctx,
            "rms_norm_eps": EPSILON,
            "rope_theta": ROPE_BASE,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "float32",
        }


Weights = dict[str, "torch.Tensor"]


def main() -> None:
    """Parse the flags, prepare the texts, train, write the checkpoint and print perplexities."""
    args = arguments()
    import torch

    torch.set_num_threads(1)
    corpus = teacher_text.prepare(args.text, args.folder, args.words, args.set)
    shape = Shape(args.hidden, args.ffn or args.hidden * 3, args.layers, args.words, args.ctx)
    master = train(args, shape, corpus)
    write_model(args.folder, shape, master)
    for name, held_out in corpus.held_out.items():
        print(
            f"held out {name}: perplexity {perplexity(shape, master, held_out):.2f} over windows of {2 * shape.ctx}"
        )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        help="folder with wiki.valid.tokens and tinyshakespeare.txt",
    )
    parser.add_argument("--set", choices=teacher_text.SETS, default=teacher_text.SETS[0])
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 256")
    parser.add_argument("--ffn", type=int, help="a multiple of 256; default 3 x hidden")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--words", type=int, default=2048, help="tokens of the vocabulary")
    parser.add_argument(
        "--ctx", type=int, default=256, help="tokens of a window; doubled in the last fifth"
    )
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "mps"])
    parser.add_argument(
        "--type", choices=["bfloat16", "float32"], help="of the products; default: the faster one"
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        default=1,
        help="1 or 2: halves of a batch in parallel; the sums are the same",
    )
    args = parser.parse_args()
    if args.hidden % 256 or (args.ffn or 0) % 256:
        parser.error("--hidden and --ffn must be multiples of 256, as rows of k-quants are")
    if args.steps <= WARMUP:
        parser.error(f"--steps must be more than the {WARMUP} of the warm-up")
    return args


def initial_weights(shape: Shape, seed: int) -> Weights:
    """Return random initial F32 weights by name. The standard deviation is 0.02, divided by
    sqrt(2 x layers) for the matrices whose output is added to the residual stream. Norms are 1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, size in shape.tensors().items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
            continue
        deviation = 0.02 / (
            (2 * shape.layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        )
        weights[name] = torch.randn(size, generator=generator) * deviation
    return weights


def forward(shape: Shape, weights: Weights, tokens: "torch.Tensor") -> "torch.Tensor":
    """Return the logits `[windows, tokens, vocabulary]` of a Llama for `tokens` `[windows,
    tokens]`, computed as by transformers' LlamaForCausalLM.
    """
    import torch
    from torch.nn import functional

    windows, length = tokens.shape
    embedding = weights["model.embed_tokens.weight"]
    cos_sin = rotation(length, embedding)
    hidden = embedding[tokens]
    mask = torch.full(
        (length, length), float("-inf"), dtype=hidden.dtype, device=hidden.device
    ).triu(1)

    def normalize(name: str) -> "torch.Tensor":
        return functional.rms_norm(hidden, (shape.hidden,), weights[name], EPSILON)

    def heads(weight_name: str, normalized: "torch.Tensor", count: int) -> "torch.Tensor":
        return (
            functional.linear(normalized, weights[weight_name])
            .view(windows, length, count, HEAD)
            .transpose(1, 2)
        )

    for block in range(shape.layers):
        prefix = f"model.layers.{block}"
        normalized = normalize(f"{prefix}.input_layernorm.weight")
        query = (
            rotate(heads(f"{prefix}.self_attn.q_proj.weight", normalized, shape.heads), cos_sin)
            * HEAD**-0.5
        )
        key = rotate(heads(f"{prefix}.self_attn.k_proj.weight", normalized, shape.kv), cos_sin)
        value = heads(f"{prefix}.self_attn.v_proj.weight", normalized, shape.kv)
        # The two query heads that share a key head are adjacent.
        query = query.reshape(windows, shape.kv, 2 * length, HEAD)
        scores = (query @ key.transpose(-1, -2)).view(windows, shape.kv, 2, length, length) + mask
        mixed = scores.softmax(-1).view(windows, shape.kv, 2 * length, length) @ value
        mixed = (
            mixed.view(windows, shape.heads, length, HEAD)
            .transpose(1, 2)
            .reshape(windows, length, shape.hidden)
        )
        hidden = hidden + functional.linear(mixed, weights[f"{prefix}.self_attn.o_proj.weight"])
        normalized = normalize(f"{prefix}.post_attention_layernorm.weight")
        gate = functional.silu(
            functional.linear(normalized, weights[f"{prefix}.mlp.gate_proj.weight"])
        )
        gate = gate * functional.linear(normalized, weights[f"{prefix}.mlp.up_proj.weight"])
        hidden = hidden + functional.linear(gate, weights[f"{prefix}.mlp.down_proj.weight"])
    return functional.linear(normalize("model.norm.weight"), embedding)


def rotation(length: int, like: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the cosines and sines `[length, HEAD]` of the rotary embedding in Hugging Face's
    layout, where both halves of a head have the same angles. `like`: a tensor of the wanted type.
    """
    import torch

    speed = ROPE_BASE ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), speed).repeat(1, 2)
    return angle.cos().to(like), angle.sin().to(like)


def rotate(heads: "torch.Tensor", cos_sin: "tuple[torch.Tensor, torch.Tensor]") -> "torch.Tensor":
    """Apply the rotary embedding to `heads` `[windows, heads, tokens, HEAD]`, and return them."""
    import torch

    cosine, sine = cos_sin
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat((-second, first), -1) * sine


def train(args: argparse.Namespace, shape: Shape, corpus: teacher_text.Corpus) -> Weights:
    """Train from the checkpoint, if there is one, to the last step; return the F32 weights."""
    import torch

    master = {
        name: value.to(args.device).requires_grad_()
        for name, value in initial_weights(shape, args.seed).items()
    }
    matrices = [value for value in master.values() if value.dim() > 1]
    vectors = [value for value in master.values() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95), fused=True)
    checkpoint = args.folder / "checkpoint.pt"
    step = load_checkpoint(checkpoint, master, adam) if checkpoint.exists() else 0
    saved_at, n_tokens, began, fall_step = (
        time.monotonic(),
        0,
        time.monotonic(),
        int(args.steps * (1 - FALL_SHARE)),
    )
    dtype = getattr(torch, args.type or product_type(args.device))
    with ThreadPoolExecutor(args.threads) as pool:
        while step < args.steps:
            rate = args.rate * min(
                1.0, (step + 1) / WARMUP, (args.steps - step) / (args.steps - fall_step)
            )
            for group in adam.param_groups:
                group["lr"] = rate
            batch = corpus.batch(
                args.seed, step, args.batch, shape.ctx * (2 if step >= fall_step else 1)
            )
            loss = compute_gradient(
                pool, shape, master, torch.from_numpy(batch).to(args.device), dtype
            )
            torch.nn.utils.clip_grad_norm_(master.values(), 1.0)
            adam.step()
            adam.zero_grad()
            step, n_tokens = step + 1, n_tokens + batch.size
            if step % 20 == 0:
                print(
                    f"step {step} loss {loss:.4f} {n_tokens / (time.monotonic() - began):.0f} tokens/s",
                    flush=True,
                )
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS or step == args.steps:
                save_checkpoint(checkpoint, master, adam, step)
                saved_at = time.monotonic()
    return {name: value.detach().cpu() for name, value in master.items()}


def product_type(device: str) -> str:
    """Return the type in which matrix products are fastest: bfloat16, or float32 on a CPU where
    torch emulates bfloat16.
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    return (
        "bfloat16"
        if device != "cpu" or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        else "float32"
    )


def compute_gradient(
    pool: ThreadPoolExecutor,
    shape: Shape,
    master: Weights,
    batch: "torch.Tensor",
    dtype: "torch.dtype",
) -> float:
    """Write the gradient of a batch `[windows, tokens + 1]` to the F32 weights `master`, and return
    the mean loss. `dtype`: type of the products.

    The halves of the batch are computed separately, in parallel if `pool` has two threads, and
    added in order. So the sums do not depend on the number of threads.
    """
    import torch
    from torch.nn import functional

    halves = batch.chunk(2)

    def half_gradient(part: "torch.Tensor") -> "tuple[float, tuple[torch.Tensor, ...]]":
        weights = {
            name: value.detach().to(dtype).requires_grad_() for name, value in master.items()
        }
        logits = forward(shape, weights, part[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        return float(loss.detach()), torch.autograd.grad(loss, list(weights.values()))

    results = list(pool.map(half_gradient, halves))
    for part, (_, gradients) in zip(halves, results, strict=True):
        for value, gradient in zip(master.values(), gradients, strict=True):
            share = gradient.float() * (len(part) / len(batch))
            value.grad = share if value.grad is None else value.grad + share
    return sum(loss * len(part) for part, (loss, _) in zip(halves, results, strict=True)) / len(
        batch
    )


def save_checkpoint(path: Path, master: Weights, adam: Any, step: int) -> None:
    """Write the state of the training to a temporary file, then rename that to `path`."""
    import torch

    partial = path.with_suffix(".part")
    torch.save({"step": step, "weights": master, "adam": adam.state_dict()}, partial)
    partial.replace(path)


def load_checkpoint(path: Path, master: Weights, adam: Any) -> int:
    """Load the state of a stopped run into `master` and `adam`; return its step."""
    import torch

    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, value in master.items():
            value.copy_(state["weights"][name])
    adam.load_state_dict(state["adam"])
    print(f"resuming at step {state['step']}", file=sys.stderr)
    return int(state["step"])


def write_model(folder: Path, shape: Shape, master: Weights) -> None:
    """Write config.json and model.safetensors (F32) to the folder."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    save_file(master, folder / "model.safetensors", metadata={"format": "pt"})


def perplexity(
    shape: Shape, weights: Weights, held_out: np.ndarray[Any, Any], max_windows: int = 40
) -> float:
    """Return the perplexity of held-out tokens. As in llama-perplexity, only the second half of
    each window counts; a window has twice the training context. At most `max_windows` are used.
    """
    import torch
    from torch.nn import functional

    length = 2 * shape.ctx
    losses = []
    with torch.no_grad():
        for start in range(0, min(len(held_out) // length, max_windows) * length, length):
            window = torch.from_numpy(held_out[start : start + length].astype(np.int64))
            window[0] = 0
            logits = forward(shape, weights, window[None])[0, length // 2 - 1 : -1]
            losses.append(float(functional.cross_entropy(logits, window[length // 2 :])))
    return float(np.exp(np.mean(losses)))


if __name__ == "__main__":
    main()
