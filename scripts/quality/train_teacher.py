#!/usr/bin/env python3
"""Train a small Llama on local texts: a full-precision model whose rows fill k-quants' superblocks.

usage: .venv/bin/python scripts/quality/train_teacher.py FOLDER --text TEXTS [--hidden 512]
       [--layers 4] [--steps 1500] [--device cpu|cuda|mps]

Quantization is judged by how little a file's answers differ from the original's; random weights
show nothing about that. TEXTS is a folder with wiki.valid.tokens and tinyshakespeare.txt; Python's
library is the code text. The last tenth of each file is held out and written to FOLDER/text, with
the calibration text from the training part. FOLDER becomes a Hugging Face checkpoint (config.json,
model.safetensors, tokenizer.json) for `llmcli convert`.

The same arguments give the same batches in the same order: a batch depends on (seed, step). A run
that was stopped resumes from FOLDER/checkpoint.pt, which is written every minute. The learning rate
is constant and falls only in the last fifth, so that a run can be shortened: stop it and start it
with fewer --steps. Weights are stored in float32 and multiplied in --type; --type and the kind of
processor change the result.
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
FALL = 0.2  # share of the steps in which the learning rate falls and the context is doubled
WARMUP = 50  # steps
EVERY = 60.0  # seconds between checkpoints
EPSILON, BASE = 1e-5, 10000.0  # of the norms; base of the rotation


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the tensors' shapes, and the context in tokens."""

    hidden: int
    ffn: int
    layers: int
    words: int
    ctx: int

    @property
    def heads(self) -> int:
        """Return the number of query heads; there are half as many key and value heads."""
        return self.hidden // HEAD

    @property
    def kv(self) -> int:
        """Return the number of key and value heads."""
        return self.heads // 2

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by name as in Hugging Face's Llama; the embedding is also the head."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.words, self.hidden)}
        for block in range(self.layers):
            at, wide, narrow = f"model.layers.{block}", self.hidden, self.kv * HEAD
            found |= {
                f"{at}.input_layernorm.weight": (wide,),
                f"{at}.self_attn.q_proj.weight": (wide, wide),
                f"{at}.self_attn.k_proj.weight": (narrow, wide),
                f"{at}.self_attn.v_proj.weight": (narrow, wide),
                f"{at}.self_attn.o_proj.weight": (wide, wide),
                f"{at}.post_attention_layernorm.weight": (wide,),
                f"{at}.mlp.gate_proj.weight": (self.ffn, wide),
                f"{at}.mlp.up_proj.weight": (self.ffn, wide),
                f"{at}.mlp.down_proj.weight": (wide, self.ffn),
            }
        return found | {"model.norm.weight": (self.hidden,)}

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
            "vocab_size": self.words,
            "max_position_embeddings": 2 * self.ctx,
            "rms_norm_eps": EPSILON,
            "rope_theta": BASE,
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
    """Prepare texts and tokenizer, train, write the checkpoint, print perplexities."""
    asked = arguments()
    import torch

    torch.set_num_threads(1)
    corpus = teacher_text.prepare(asked.text, asked.folder, asked.words)
    shape = Shape(asked.hidden, asked.ffn or asked.hidden * 3, asked.layers, asked.words, asked.ctx)
    master = train(asked, shape, corpus)
    save(asked.folder, shape, master)
    for name, held in corpus.held.items():
        print(
            f"held out {name}: perplexity {perplexity(shape, master, held):.2f} over windows of {2 * shape.ctx}"
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
        "--threads",
        type=int,
        default=1,
        help="1 or 2: halves of a batch in parallel; the sums are the same",
    )
    asked = parser.parse_args()
    if asked.hidden % 256 or (asked.ffn or 0) % 256:
        parser.error("--hidden and --ffn must be multiples of 256, as rows of k-quants are")
    if asked.steps <= WARMUP:
        parser.error(f"--steps must be more than the {WARMUP} of the warm-up")
    return asked


def draw(shape: Shape, seed: int) -> Weights:
    """Return initial F32 weights: normal with 0.02; outputs to the residual are divided by sqrt(2 x
    layers).
    """
    import torch

    chance = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, size in shape.tensors().items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
            continue
        spread = 0.02 / (
            (2 * shape.layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        )
        weights[name] = torch.randn(size, generator=chance) * spread
    return weights


def forward(shape: Shape, weights: Weights, tokens: "torch.Tensor") -> "torch.Tensor":
    """Return logits `[windows, tokens, words]` of a Llama, as transformers' LlamaForCausalLM
    computes them.
    """
    import torch
    from torch.nn import functional

    windows, length = tokens.shape
    embedding = weights["model.embed_tokens.weight"]
    turn = rotation(length, embedding)
    hidden = embedding[tokens]
    mask = torch.full(
        (length, length), float("-inf"), dtype=hidden.dtype, device=hidden.device
    ).triu(1)

    def normed(name: str) -> "torch.Tensor":
        return functional.rms_norm(hidden, (shape.hidden,), weights[name], EPSILON)

    def heads(at: str, seen: "torch.Tensor", count: int) -> "torch.Tensor":
        return (
            functional.linear(seen, weights[at]).view(windows, length, count, HEAD).transpose(1, 2)
        )

    for block in range(shape.layers):
        at = f"model.layers.{block}"
        seen = normed(f"{at}.input_layernorm.weight")
        query = turned(heads(f"{at}.self_attn.q_proj.weight", seen, shape.heads), turn) * HEAD**-0.5
        key = turned(heads(f"{at}.self_attn.k_proj.weight", seen, shape.kv), turn)
        value = heads(f"{at}.self_attn.v_proj.weight", seen, shape.kv)
        query = query.reshape(
            windows, shape.kv, 2 * length, HEAD
        )  # both query heads of a group are adjacent
        scores = (query @ key.transpose(-1, -2)).view(windows, shape.kv, 2, length, length) + mask
        mixed = scores.softmax(-1).view(windows, shape.kv, 2 * length, length) @ value
        mixed = (
            mixed.view(windows, shape.heads, length, HEAD)
            .transpose(1, 2)
            .reshape(windows, length, shape.hidden)
        )
        hidden = hidden + functional.linear(mixed, weights[f"{at}.self_attn.o_proj.weight"])
        seen = normed(f"{at}.post_attention_layernorm.weight")
        gate = functional.silu(functional.linear(seen, weights[f"{at}.mlp.gate_proj.weight"]))
        gate = gate * functional.linear(seen, weights[f"{at}.mlp.up_proj.weight"])
        hidden = hidden + functional.linear(gate, weights[f"{at}.mlp.down_proj.weight"])
    return functional.linear(normed("model.norm.weight"), embedding)


def rotation(length: int, like: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return cosines and sines `[length, HEAD]` of the rotary embedding, in halves as Hugging Face
    does.
    """
    import torch

    speed = BASE ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), speed).repeat(1, 2)
    return angle.cos().to(like), angle.sin().to(like)


def turned(heads: "torch.Tensor", turn: "tuple[torch.Tensor, torch.Tensor]") -> "torch.Tensor":
    """Return `heads` `[windows, heads, tokens, HEAD]` rotated by position."""
    import torch

    cosine, sine = turn
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat((-second, first), -1) * sine


def train(asked: argparse.Namespace, shape: Shape, corpus: teacher_text.Corpus) -> Weights:
    """Return the F32 weights after the last step."""
    import torch

    master = {
        name: value.to(asked.device).requires_grad_()
        for name, value in draw(shape, asked.seed).items()
    }
    wide = [value for value in master.values() if value.dim() > 1]
    thin = [value for value in master.values() if value.dim() == 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=asked.rate, betas=(0.9, 0.95), fused=True)
    at = asked.folder / "checkpoint.pt"
    step = resume(at, master, adam) if at.exists() else 0
    saved, seen, began, fall = time.monotonic(), 0, time.monotonic(), int(asked.steps * (1 - FALL))
    kind = getattr(torch, asked.type or products(asked.device))
    with ThreadPoolExecutor(asked.threads) as pool:
        while step < asked.steps:
            rate = asked.rate * min(
                1.0, (step + 1) / WARMUP, (asked.steps - step) / (asked.steps - fall)
            )
            for group in adam.param_groups:
                group["lr"] = rate
            batch = corpus.batch(
                asked.seed, step, asked.batch, shape.ctx * (2 if step >= fall else 1)
            )
            loss = descend(pool, shape, master, torch.from_numpy(batch).to(asked.device), kind)
            torch.nn.utils.clip_grad_norm_(master.values(), 1.0)
            adam.step()
            adam.zero_grad()
            step, seen = step + 1, seen + batch.size
            if step % 20 == 0:
                print(
                    f"step {step} loss {loss:.4f} {seen / (time.monotonic() - began):.0f} tokens/s",
                    flush=True,
                )
            if time.monotonic() - saved > EVERY or step == asked.steps:
                keep(at, master, adam, step)
                saved = time.monotonic()
    return {name: value.detach().cpu() for name, value in master.items()}


def products(device: str) -> str:
    """Return the faster type of products: bfloat16, except on a CPU where torch emulates it."""
    import torch

    found = torch.cpu.get_capabilities()
    return (
        "bfloat16"
        if device != "cpu" or found.get("avx512_bf16") or found.get("amx_bf16")
        else "float32"
    )


def descend(
    pool: ThreadPoolExecutor,
    shape: Shape,
    master: Weights,
    batch: "torch.Tensor",
    kind: "torch.dtype",
) -> float:
    """Write the gradient of a batch `[windows, tokens + 1]` to `master`; return the mean loss.

    Halves are computed separately and added in order, so that the sums do not depend on the number
    of threads.
    """
    import torch
    from torch.nn import functional

    halves = batch.chunk(2)

    def half(part: "torch.Tensor") -> "tuple[float, tuple[torch.Tensor, ...]]":
        weights = {name: value.detach().to(kind).requires_grad_() for name, value in master.items()}
        logits = forward(shape, weights, part[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        return float(loss.detach()), torch.autograd.grad(loss, list(weights.values()))

    results = list(pool.map(half, halves))
    for part, (_, gradients) in zip(halves, results, strict=True):
        for value, gradient in zip(master.values(), gradients, strict=True):
            share = gradient.float() * (len(part) / len(batch))
            value.grad = share if value.grad is None else value.grad + share
    return sum(loss * len(part) for part, (loss, _) in zip(halves, results, strict=True)) / len(
        batch
    )


def keep(at: Path, master: Weights, adam: Any, step: int) -> None:
    """Write the state to a temporary file, then rename it."""
    import torch

    part = at.with_suffix(".part")
    torch.save({"step": step, "weights": master, "adam": adam.state_dict()}, part)
    part.replace(at)


def resume(at: Path, master: Weights, adam: Any) -> int:
    """Load the state of a stopped run; return its step."""
    import torch

    state = torch.load(at, weights_only=True)
    with torch.no_grad():
        for name, value in master.items():
            value.copy_(state["weights"][name])
    adam.load_state_dict(state["adam"])
    print(f"resuming at step {state['step']}", file=sys.stderr)
    return int(state["step"])


def save(folder: Path, shape: Shape, master: Weights) -> None:
    """Write config.json and model.safetensors in F32."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    save_file(master, folder / "model.safetensors", metadata={"format": "pt"})


def perplexity(shape: Shape, weights: Weights, held: np.ndarray[Any, Any], most: int = 40) -> float:
    """Return exp of the mean loss over the second halves of up to `most` windows, as
    llama-perplexity does.
    """
    import torch
    from torch.nn import functional

    length = 2 * shape.ctx
    losses = []
    with torch.no_grad():
        for start in range(0, min(len(held) // length, most) * length, length):
            window = torch.from_numpy(held[start : start + length].astype(np.int64))
            window[0] = 0
            logits = forward(shape, weights, window[None])[0, length // 2 - 1 : -1]
            losses.append(float(functional.cross_entropy(logits, window[length // 2 :])))
    return float(np.exp(np.mean(losses)))


if __name__ == "__main__":
    main()
