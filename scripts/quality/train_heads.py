#!/usr/bin/env python3
"""Train draft heads (Medusa, blockwise) for a model on its own answers.

usage: .venv/bin/python scripts/quality/train_heads.py FOLDER --model MODEL.gguf [--method medusa]
       [--heads 4] [--answers 400] [--tokens 128] [--steps 1500] [-t 2]

FOLDER becomes a checkpoint of heads (config.json, medusa_lm_head.safetensors) for
`llmcli convert MODEL.gguf --heads FOLDER`. Needs torch and safetensors.

The model answers prompts about the calibration texts of this project, greedily and several at once.
A second pass over the texts gives its final hidden states. Head k learns, from the state of a
token, the token k + 2 places after it. The output matrix is the model's own and stays as it is. The
loss covers only the tokens that occur in the answers and OTHER_TOKENS others, because most of the
time is spent on the product with the matrix; the acceptance is measured with all tokens.

Two tenths of the passages are held out with all their prompts. The answers to one of them choose,
every hundred steps, the heads that are kept: those that yield the most tokens a pass. The answers to
the other one give the printed acceptance: for each head, how often its guess is right if all guesses
before it are right, and how many tokens a pass would yield.

The same arguments, number of threads and machine give the same heads.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.drafting.draft_files.heads_file import (
    BLOCKWISE,
    HEAD_METHODS,
    MAX_HEADS,
    MEDUSA,
    output_matrix,
)
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message
from quant.model_file.model_header import ModelHeader
from quant.native import ggml

if TYPE_CHECKING:
    import torch

TEXTS = Path(__file__).parents[2] / "quant" / "texts" / "calibration"
PASSAGE_CHARACTERS = 600  # of a text in a prompt
MAX_PROMPT_TOKENS = 512  # longer prompts are left out
PROSE_TASKS = (
    "Summarize this text in a few sentences:",
    "Continue this text:",
    "Write three questions about this text, and answer them:",
    "Explain this text in simple words:",
)
CODE_TASKS = (
    "Explain what this code does, step by step:",
    "Write comments for this code:",
    "Find possible errors in this code:",
)
HELD_OUT_STEP = 10  # passages of which one is held out to choose the heads, and one to measure them
TRAINED, CHOOSING, MEASURED = "trained", "choosing", "measured"  # parts of the passages
ANSWERS_AT_ONCE = 8
PROMPT_ROWS, STATE_ROWS = 512, 64  # rows of a pass without and with states
OTHER_TOKENS = 4096  # tokens of the loss that do not occur in the answers
BATCH_STATES = 512
RATE, WARMUP_STEPS = 1e-3, 50
HEAD_WEIGHT = 0.8  # of the loss of each head, relative to the one before it
TEST_STATES = 2048  # held-out states that are measured
EVALUATION_STEPS = 100

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Parameters = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the number of the passage that it is about."""

    passage: int
    text: str


@dataclass(frozen=True)
class AnsweredPrompt:
    """The tokens of a prompt with its answer, and where the answer begins."""

    tokens: list[int]
    start: int
    part: str


@dataclass(frozen=True)
class Examples:
    """Hidden states `[examples, n_embd]`, and the tokens that heads shall guess from them
    `[examples, heads]`; -1 after the end of an answer.
    """

    states: Floats
    labels: Ids


def main() -> None:
    """Parse the flags, let the model answer, train, measure and write."""
    args = parse_arguments()
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    slots = ANSWERS_AT_ONCE
    options = RunOptions(ctx_size=slots * (MAX_PROMPT_TOKENS + args.tokens), threads=args.threads)
    with open_runner(args.model, options, slots=slots) as runner:
        texts = list(answer_prompts(runner, args))
        n_tokens = sum(len(text.tokens) - text.start for text in texts)
        print(
            f"{len(texts)} answers, {n_tokens} tokens, {time.monotonic() - began:.0f} s", flush=True
        )
        sets = {
            part: read_examples(runner, [text for text in texts if text.part == part], args)
            for part in (TRAINED, CHOOSING, MEASURED)
        }
        output = read_output(runner.header)
    print(f"{len(sets[TRAINED].states)} states, {time.monotonic() - began:.0f} s", flush=True)
    parameters = train(sets[TRAINED], sets[CHOOSING], output, args)
    print(f"trained, {time.monotonic() - began:.0f} s", flush=True)
    rates = acceptance(parameters, sets[MEASURED], output, args)
    chain = np.cumprod(rates)
    print("acceptance " + " ".join(f"{rate:.3f}" for rate in rates))
    print(
        "tokens a pass " + " ".join(f"{1 + chain[:n].sum():.2f}" for n in range(1, len(chain) + 1))
    )
    write_heads(parameters, args)
    print(f"next: llmcli convert {args.model} --heads {args.folder}")


def parse_arguments() -> argparse.Namespace:
    """Return the parsed flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF with a chat template")
    parser.add_argument("--method", choices=HEAD_METHODS, default=MEDUSA)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="residual blocks of a Medusa head")
    parser.add_argument(
        "--hidden", type=int, default=0, help="hidden values of blockwise heads [4 x the state]"
    )
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    if not 0 < args.heads <= MAX_HEADS:
        parser.error(f"--heads must be 1 to {MAX_HEADS}")
    n_prompts = len(list_prompts())
    if not 2 * HELD_OUT_STEP <= args.answers <= n_prompts:
        parser.error(f"--answers must be {2 * HELD_OUT_STEP} to {n_prompts}")
    for flag in ("layers", "tokens", "steps", "threads"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} must be at least 1")
    if args.tokens <= args.heads:
        parser.error("--tokens must be more than --heads, or the last head learns nothing")
    if args.hidden < 0 or (args.hidden and args.method != BLOCKWISE):
        parser.error("--hidden must be a number of hidden values, with --method blockwise")
    return args


def list_prompts() -> list[Prompt]:
    """Return all prompts about the calibration texts."""
    talks = json.loads((TEXTS / "talks.json").read_text())
    passages = [[text] for talk in talks for role, text in talk if role == "user"]
    for file in sorted(TEXTS.glob("*.txt")):
        tasks = CODE_TASKS if file.name.startswith("code") else PROSE_TASKS
        passages += [
            [f"{task}\n\n{text}" for task in tasks] for text in split_passages(file.read_text())
        ]
    return [Prompt(number, text) for number, texts in enumerate(passages) for text in texts]


def choose_prompts(count: int, seed: int) -> list[Prompt]:
    """Return `count` different prompts in random order."""
    prompts = list_prompts()
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [prompts[number] for number in order[:count]]


def split_passages(text: str) -> Iterator[str]:
    """Yield passages of about PASSAGE_CHARACTERS, which end with a paragraph."""
    passage = ""
    for paragraph in text.split("\n\n"):
        passage += paragraph[:PASSAGE_CHARACTERS] + "\n\n"
        if len(passage) >= PASSAGE_CHARACTERS:
            yield passage.strip()
            passage = ""
    if passage.strip():
        yield passage.strip()


def part_of(prompt: Prompt) -> str:
    """Return the part of the passages that a prompt belongs to."""
    return {0: MEASURED, 1: CHOOSING}.get(prompt.passage % HELD_OUT_STEP, TRAINED)


def answer_prompts(runner: Runner, args: argparse.Namespace) -> Iterator[AnsweredPrompt]:
    """Yield the prompts with their greedy answers. Prompts of more than MAX_PROMPT_TOKENS are left
    out.
    """
    greedy = default_sampling().with_values({"temp": 0})
    engine = runner.engine
    encoded = [
        (prompt, runner.encode_chat([Message("user", prompt.text)]))
        for prompt in choose_prompts(args.answers, args.seed)
    ]
    short = [found for found in encoded if len(found[1]) <= MAX_PROMPT_TOKENS]
    if missing := {TRAINED, CHOOSING, MEASURED} - {part_of(prompt) for prompt, _ in short}:
        sys.exit(f"no prompts of the part {min(missing)}: give more --answers or another --seed")
    for first in range(0, len(short), ANSWERS_AT_ONCE):
        batch = short[first : first + ANSWERS_AT_ONCE]
        ids = [
            engine.submit(Request(tokens, greedy, max_tokens=args.tokens, strategy="plain"))
            for _, tokens in batch
        ]
        while engine.is_busy:
            engine.step()
        for number, (prompt, tokens) in zip(ids, batch, strict=True):
            answer = engine.pop_answer(number)
            if answer.error:
                raise answer.error
            text = [*tokens, *(token.id for token in answer.tokens)]
            yield AnsweredPrompt(text, len(tokens), part_of(prompt))


def read_examples(
    runner: Runner, texts: list[AnsweredPrompt], args: argparse.Namespace
) -> Examples:
    """Return the states of the model at each token of the answers, and the tokens after the next
    one.
    """
    states: list[Floats] = []
    labels: list[list[int]] = []
    options = ContextOptions(
        MAX_PROMPT_TOKENS + args.tokens + 1,
        PROMPT_ROWS,
        PROMPT_ROWS,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_outputs=STATE_ROWS,
        outputs_final_states=True,
    )
    with open_context(runner.model, options) as context:
        for text in texts:
            found = compute_states(context, text.tokens, text.start - 1)
            padded = [*text.tokens, *[-1] * (args.heads + 1)]
            for position, state in enumerate(found, text.start - 1):
                states.append(state)
                labels.append(padded[position + 2 : position + 2 + args.heads])
    return Examples(np.stack(states), np.array(labels, np.int64))


def compute_states(context: Context, tokens: list[int], first: int) -> Iterator[Floats]:
    """Yield the final hidden states of a text from position `first` on."""
    context.clear()
    at = 0
    while at < len(tokens):
        wanted = at >= first
        end = min(len(tokens), at + STATE_ROWS) if wanted else min(first, at + PROMPT_ROWS)
        count = end - at
        context.decode(BatchRows(tokens[at:end], range(at, end), [0] * count, [wanted] * count))
        for index in range(count if wanted else 0):
            state = context.final_state(index)
            assert state is not None
            yield state
        at = end


def read_output(header: ModelHeader) -> Floats:
    """Return the model's output matrix, `[n_vocab, n_embd]`."""
    tensor = output_matrix(header)
    data = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
    return ggml.decode(data, tensor.type, tensor.shape[0], label=tensor.name)


def initial_parameters(n_embd: int, args: argparse.Namespace) -> Parameters:
    """Return parameters with which each head guesses the model's own next token."""
    import torch

    if args.method == BLOCKWISE:
        hidden = args.hidden or 4 * n_embd
        found = {
            "hidden.weight": torch.randn(hidden, n_embd) / n_embd**0.5,
            "hidden.bias": torch.zeros(hidden),
        }
        for head in range(args.heads):
            found[f"{head}.weight"] = torch.zeros(n_embd, hidden)
            found[f"{head}.bias"] = torch.zeros(n_embd)
        return found
    return {
        f"{head}.{layer}.linear.{kind}": torch.zeros(
            (n_embd, n_embd)[: 2 if kind == "weight" else 1]
        )
        for head in range(args.heads)
        for layer in range(args.layers)
        for kind in ("weight", "bias")
    }


def head_states(
    parameters: Parameters, states: "torch.Tensor", args: argparse.Namespace
) -> "list[torch.Tensor]":
    """Return for each head the states `[examples, n_embd]` that the output matrix is multiplied
    with (heads_file.py).
    """
    from torch.nn import functional

    if args.method == BLOCKWISE:
        hidden = functional.linear(
            states, parameters["hidden.weight"], parameters["hidden.bias"]
        ).relu()
        return [
            states
            + functional.linear(hidden, parameters[f"{head}.weight"], parameters[f"{head}.bias"])
            for head in range(args.heads)
        ]
    found = []
    for head in range(args.heads):
        values = states
        for layer in range(args.layers):
            name = f"{head}.{layer}.linear"
            values = values + functional.silu(
                functional.linear(values, parameters[f"{name}.weight"], parameters[f"{name}.bias"])
            )
        found.append(values)
    return found


def train(
    examples: Examples, choosing: Examples, output: Floats, args: argparse.Namespace
) -> Parameters:
    """Return the parameters that yield the most tokens a pass with the examples `choosing`. Prints
    the loss of each head and these tokens every EVALUATION_STEPS steps.
    """
    import torch
    from torch.nn import functional

    random = np.random.default_rng(args.seed)
    others = random.choice(len(output), min(OTHER_TOKENS, len(output)), replace=False)
    ids = np.union1d(np.unique(examples.labels[examples.labels >= 0]), others)
    matrix = torch.from_numpy(output[ids])
    columns = np.full(len(output) + 1, -1, np.int64)
    columns[ids] = np.arange(len(ids))
    states = torch.from_numpy(examples.states)
    labels = torch.from_numpy(columns[examples.labels])  # the last entry is that of the label -1
    parameters = {
        name: value.requires_grad_()
        for name, value in initial_parameters(output.shape[1], args).items()
    }
    adam = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.01)
    best, chosen = 0.0, copy_parameters(parameters)
    for step in range(args.steps):
        rate = RATE * min(1.0, (step + 1) / WARMUP_STEPS, 2 * (args.steps - step) / args.steps)
        for group in adam.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(random.integers(0, len(states), BATCH_STATES))
        losses = [
            functional.cross_entropy(values @ matrix.T, labels[batch, head], ignore_index=-1)
            for head, values in enumerate(head_states(parameters, states[batch], args))
        ]
        total: Any = sum(HEAD_WEIGHT**head * loss for head, loss in enumerate(losses))
        adam.zero_grad()
        total.backward()
        adam.step()
        if (step + 1) % EVALUATION_STEPS == 0 or step + 1 == args.steps:
            shown = " ".join(f"{loss.item():.3f}" for loss in losses)
            found = copy_parameters(parameters)
            tokens = 1 + np.cumprod(acceptance(found, choosing, output, args)).sum()
            print(f"step {step + 1} loss {shown}, {tokens:.3f} tokens a pass", flush=True)
            if tokens > best:
                best, chosen = tokens, found
    return chosen


def copy_parameters(parameters: Parameters) -> Parameters:
    """Return a copy of the present values."""
    return {name: value.detach().clone() for name, value in parameters.items()}


def acceptance(
    parameters: Parameters, examples: Examples, output: Floats, args: argparse.Namespace
) -> list[float]:
    """Return for each head the share of its right guesses among those after right guesses only."""
    import torch

    states = torch.from_numpy(examples.states[:TEST_STATES])
    labels = examples.labels[:TEST_STATES]
    matrix = torch.from_numpy(output)
    rates: list[float] = []
    reached = labels[:, 0] >= 0
    for head, values in enumerate(head_states(parameters, states, args)):
        guesses = torch.cat([(part @ matrix.T).argmax(1) for part in values.split(128)]).numpy()
        reached = reached & (labels[:, head] >= 0)
        right = reached & (guesses == labels[:, head])
        rates.append(float(right.sum() / max(1, reached.sum())))
        reached = right
    return rates


def write_heads(parameters: Parameters, args: argparse.Namespace) -> None:
    """Write the checkpoint of the heads, in float16."""
    from safetensors.torch import save_file

    args.folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"base_model_name_or_path": args.model.stem}
    if args.method == MEDUSA:
        config |= {"medusa_num_heads": args.heads, "medusa_num_layers": args.layers}
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: value.half().contiguous() for name, value in parameters.items()}
    save_file(tensors, args.folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
