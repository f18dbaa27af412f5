"""The likeliest tokens of each position, compared with numpy's sort and with transformers."""

from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.top_logprobs import top_logprobs
from tests.fixtures import beams
from tests.fixtures.drafts import Knowing
from tests.runtime.strategies.test_speculative import VERSE, answer_twice


@pytest.mark.parametrize("size", [1, 9, 260, 16_385, 50_257])
@pytest.mark.parametrize("count", [1, 5, 10, 100])
def test_likeliest_tokens_equal_those_of_a_full_sort(size: int, count: int) -> None:
    logits = np.random.default_rng(size).normal(0, 4, size).astype(np.float32).round(1)  # with ties
    exact = logits.astype(np.float64)
    logprobs = exact - np.logaddexp.reduce(exact)
    expected = sorted(range(size), key=lambda token: (-logits[token], token))[:count]
    found = top_logprobs(logits, count, float(np.logaddexp.reduce(exact)))
    assert [one.token for one in found] == expected
    assert [one.logprob for one in found] == pytest.approx(logprobs[expected], abs=1e-5)


def test_forbidden_tokens_are_not_among_the_likeliest() -> None:
    logits = np.array([0, -np.inf, 1, -np.inf], np.float32)
    assert [one.token for one in top_logprobs(logits, 4, 0.0)] == [2, 0]


def test_drafted_tokens_have_the_same_likeliest_tokens_as_in_plain_decoding() -> None:
    plain, speculative, context = answer_twice(
        VERSE, Knowing(VERSE, 0.7, chance=0.99), logprobs=True, top_logprobs=3
    )
    assert len(context.batches) < len(VERSE)
    assert speculative.top_logprobs == plain.top_logprobs
    assert [one[0].token for one in speculative.top_logprobs] == list(VERSE)


def test_likeliest_tokens_of_an_answer_equal_those_of_transformers(
    stories: Path, stories_gguf: Path
) -> None:
    model = beams.oracle(stories)
    import torch

    options = RunOptions(
        ctx_size=256,
        threads=1,
        batch_size=256,
        cache_type_k="f32",
        cache_type_v="f32",
        flash_attn="off",
    )
    with open_runner(stories_gguf, options, placement=ON_HOST) as runner:
        prompt = runner.encode_text("Once upon a time, Tom")
        sampling = default_sampling().with_values({"seed": 3, "temp": 1.5})
        reply = runner.reply(
            Request(prompt, sampling, max_tokens=24, ignore_eos=True, logprobs=True, top_logprobs=7)
        )
        for _ in reply:
            pass
        answer = reply.answer
    with torch.no_grad():
        logits = (
            model(torch.tensor([[*prompt, *(token.id for token in answer.tokens)]]))
            .logits[0]
            .double()
        )
    table = torch.log_softmax(logits, -1).numpy()[len(prompt) - 1 : -1]
    assert len(answer.top_logprobs) == len(answer.tokens) == 24
    for row, token, likeliest in zip(table, answer.tokens, answer.top_logprobs, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-3)
        assert [one.logprob for one in likeliest] == pytest.approx(np.sort(row)[:-8:-1], abs=1e-3)
        assert [one.logprob for one in likeliest] == pytest.approx(
            [row[one.token] for one in likeliest], abs=1e-3
        )
