"""Beam search on both sides: ours over llama.cpp, and transformers' as the oracle; float32, the
same weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.model import Model
from llmcli.runtime.constraint.base import Grammar
from llmcli.runtime.engine import Engine
from llmcli.runtime.request import Request
from llmcli.runtime.sampling import defaults
from llmcli.runtime.search import Search
from llmcli.runtime.strategies.base import Vocabulary

Found = list[
    tuple[tuple[int, ...], float]
]  # tokens without the end token, and the score; best first
NAMES = ("Tom", "Lily", "Ben", "Mia", "the dog", "a cat", "Sam", "the king", "a bird", "Anna")
FORMS = (
    "Once upon a time, {} wanted",
    "One day {} saw a big",
    '"Where are you?" said {}.',
    "In the park {} found",
    "It was raining and {}",
)
COPY = -1e5
EARLY = {"no": False, "yes": True, "never": "never"}
PROMPTS = tuple(form.format(name) for form in FORMS for name in NAMES)


def ours(
    context: Context,
    model: Model,
    prompt: list[int],
    search: Search,
    tokens: int,
    ends: set[int],
    grammar: Grammar | None = None,
) -> Found:
    """What our search finds in an empty context; the ledger is checked after every pass."""
    context.clear()
    engine = Engine(context, Vocabulary(model.piece, ends.__contains__, model.n_vocab), None)
    wanted = Request(
        tuple(prompt),
        defaults(),
        max_tokens=tokens,
        strategy="beam",
        search=search,
        grammar=grammar,
    )
    number = engine.submit(wanted)
    while engine.busy:
        engine.step()
        engine.ledger.check()
    return [(beam.tokens, beam.score) for beam in engine.answer(number).beams]


def oracle(folder: Path) -> Any:
    """transformers' model of a folder."""
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: transformers computes nothing"
    )
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def theirs(
    model: Any,
    prompt: list[int],
    search: Search,
    tokens: int,
    ends: set[int],
    legal: Callable[[list[int]], list[int]] | None = None,
) -> Found:
    """What transformers' search finds; `legal` are the tokens that may follow an answer's, all
    where it is None.

    Where fewer texts are legal than there are beams it fills the others with copies, 1e9 less
    likely: left out here.
    """
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=search.beams,
            num_return_sequences=search.beams,
            max_new_tokens=tokens,
            length_penalty=search.length_penalty,
            early_stopping=EARLY[search.early_stopping],
            eos_token_id=sorted(ends),
            pad_token_id=min(ends),
            output_scores=True,
            return_dict_in_generate=True,
            prefix_allowed_tokens_fn=legal
            and (lambda _, said: legal(said[len(prompt) :].tolist())),
        )
    found = []
    for row, score in zip(
        made.sequences[:, len(prompt) :].tolist(), made.sequences_scores.tolist(), strict=True
    ):
        end = next((at for at, token in enumerate(row) if token in ends), len(row))
        if score > COPY:
            found.append((tuple(row[:end]), score))
    return found


def same(one: Found, other: Found, tolerance: float = 1e-4) -> bool:
    """The same answers in the same order, with the same scores (a penalty below 0 makes large
    ones).
    """
    return [tokens for tokens, _ in one] == [tokens for tokens, _ in other] and all(
        abs(mine - yours) <= tolerance * max(1, abs(yours))
        for (_, mine), (_, yours) in zip(one, other, strict=True)
    )
