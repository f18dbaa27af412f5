"""Probabilities of the prompt's tokens: complete after any scheduling."""

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.request import Answer, Request
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.sampling.top_logprobs import TokenScore
from tests.fixtures.fakes import FakeContext, FakeModel

GREEDY = default_sampling().with_values({"temp": 0})
PROMPTS = [
    b"a long prompt that many others begin with",
    b"a long prompt that goes on otherwise",
    b"another",
    b"x",
]


def answers(prompts: list[bytes], **fake: int) -> tuple[list[Answer], Engine]:
    model = FakeModel()
    engine = Engine(FakeContext(**fake), model, None)  # type: ignore[arg-type]
    asked = [
        Request(tuple(one), GREEDY, 40, ignore_eos=True, score_prompt=True, top_logprobs=2)
        for one in prompts
    ]
    ids = [engine.submit(one) for one in asked]
    while engine.is_busy:
        engine.step()
        engine.check()
    return [engine.pop_answer(one) for one in ids], engine


def told(answer: Answer) -> tuple[TokenScore, ...]:
    assert len(answer.prompt_scores) == answer.prompt_tokens - 1
    assert answer.cached_tokens == 0
    return answer.prompt_scores


@pytest.mark.parametrize(
    "fake",
    [
        {"n_ctx": 600, "n_outputs": 4},
        {"n_ctx": 600, "n_batch": 5, "n_outputs": 1},
        {"n_ctx": 110},
        {"n_ctx": 600, "abort_at": 2},
    ],
)
def test_none_is_lost_in_small_passes_a_full_pool_or_a_pass_that_was_broken_off(
    fake: dict[str, int],
) -> None:
    alone = [told(answers([one], n_ctx=600)[0][0]) for one in PROMPTS]
    found, engine = answers(PROMPTS * 2, n_seq_max=4, **fake)
    assert [told(one) for one in found] == alone * 2
    if fake["n_ctx"] < 600:
        assert engine.scheduler.n_preemptions
