"""Beam search finds the same answers as transformers, on a tiny real model in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.beam_settings import BeamSettings
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures import beams


@pytest.fixture(scope="module")
def opened(stories_gguf: Path) -> Iterator[tuple[Context, Model]]:
    options = ContextOptions(
        512, n_batch=512, n_seq_max=8, type_k="f32", type_v="f32", flash_attn="off"
    )
    with open_model(stories_gguf, ON_HOST) as model, open_context(model, options) as context:
        yield context, model


@pytest.fixture(scope="module")
def oracle(stories: Path) -> Any:
    """Return the same model in transformers."""
    return beams.oracle(stories)


@pytest.mark.parametrize(
    ("number", "search", "ends"),
    [
        (0, BeamSettings(2), ""),
        (11, BeamSettings(4), ""),
        (22, BeamSettings(4, 0.0), "."),
        (33, BeamSettings(4, 2.0, "never"), "."),
        (44, BeamSettings(4, 1.0, "yes"), ".,"),
        (5, BeamSettings(3, -1.0, "never"), ".,"),
        (16, BeamSettings(8, 1.0), ".,"),
        (27, BeamSettings(5, 0.5), "."),
    ],
)
def test_answers_and_scores_equal_those_of_transformers(
    number: int, search: BeamSettings, ends: str, opened: tuple[Context, Model], oracle: Any
) -> None:
    context, model = opened
    prompt = model.tokenize(beams.PROMPTS[number], special=False, add_special=True)
    # this model never generates its end token, so some punctuation ends an answer
    stops = {2} | {
        token for token in range(model.n_vocab) if model.piece(token) in [c.encode() for c in ends]
    }
    expected = beams.theirs(oracle, prompt, search, 24, stops)
    found = beams.ours(context, model, prompt, search, 24, stops)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx(
        [score for _, score in expected], abs=1e-4
    )


@pytest.mark.model
@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
def test_beam_search_runs_with_every_kind_of_cache_type(cache_type: str, smollm2: Path) -> None:
    options = RunOptions(
        ctx_size=256,
        threads=1,
        batch_size=256,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        flash_attn="on",
    )
    with open_runner(smollm2, options, slots=4) as runner:
        prompt = runner.encode_text("The capital of France is")
        reply = runner.reply(
            Request(
                prompt, default_sampling(), max_tokens=6, strategy="beam", search=BeamSettings(4)
            )
        )
        for _ in reply:
            runner.engine.ledger.check()
        assert len({beam.tokens for beam in reply.answer.beams}) == 4
