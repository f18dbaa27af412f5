"""llama.cpp's sampler chains inside a grammar: draws from a few allowed tokens."""

from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.binding.sampler import NativeChain, NativeChains
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.chain import make_chain
from llmcli.runtime.strategies.constrained_chain import few_legal_tokens, mask_logits

SETTINGS = [
    {},
    {"top_k": 0, "top_p": 1, "min_p": 0, "temp": 2},
    {"repeat_penalty": 1.5, "presence_penalty": 0.5},
    {"dry_multiplier": 1},
    {"xtc_probability": 0.5},
    {"typical": 0.7},
    {"dynatemp_range": 0.5},
    {"mirostat": 2},
    {"logit_bias": ("300+3", "301-inf")},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draw_among_few_tokens_equals_the_draw_from_masked_logits(
    settings: dict, stories_gguf: Path
) -> None:
    random = np.random.default_rng(1)
    options = ContextOptions(128)
    with open_model(stories_gguf) as model, open_context(model, options) as context:
        native = NativeChains(model.n_vocab, model.vocab)
        chains = [
            make_chain(default_sampling().with_values(settings), 5, native, model) for _ in range(2)
        ]
        few_chain, all_chain = chains
        assert isinstance(few_chain, NativeChain)
        tokens = model.tokenize("Once upon a time", special=False)
        rows = context.decode(
            BatchRows(
                tokens, range(len(tokens)), [0] * len(tokens), [False] * (len(tokens) - 1) + [True]
            )
        )
        drawn = set()
        for _ in range(40):
            allowed = random.random(model.n_vocab) < random.choice([0.005, 0.05, 0.3])
            allowed[[300, 301, 302]] = True
            bits = np.packbits(allowed, bitorder="little")
            few = few_legal_tokens(bits)
            assert few is not None
            token = few_chain.draw_among(rows[0], few, tokens)
            restore = mask_logits(rows[0].logits, bits)
            expected = all_chain.draw(rows[0], tokens)
            restore()
            assert token == expected
            assert allowed[token]
            drawn.add(token)
            tokens.append(token)
            rows = context.decode(BatchRows([token], [len(tokens) - 1], [0], [True]))
        assert len(drawn) > 5
        for chain in chains:
            chain.close()
