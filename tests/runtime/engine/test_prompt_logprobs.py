"""The log-probabilities of prompt tokens are complete and equal with any scheduling."""

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


def answers(prompts: list[bytes], **context_options: int) -> tuple[list[Answer], Engine]:
    model = FakeModel()
    engine = Engine(FakeContext(**context_options), model, None)  # type: ignore[arg-type]
    requests = [
        Request(tuple(prompt), GREEDY, 40, ignore_eos=True, score_prompt=True, top_logprobs=2)
        for prompt in prompts
    ]
    ids = [engine.submit(request) for request in requests]
    while engine.is_busy:
        engine.step()
        engine.check()
    return [engine.pop_answer(number) for number in ids], engine


def prompt_scores_of(answer: Answer) -> tuple[TokenScore, ...]:
    assert len(answer.prompt_scores) == answer.prompt_tokens - 1
    assert answer.cached_tokens == 0
    return answer.prompt_scores


@pytest.mark.parametrize(
    "context_options",
    [
        {"n_ctx": 600, "n_outputs": 4},
        {"n_ctx": 600, "n_batch": 5, "n_outputs": 1},
        {"n_ctx": 110},
        {"n_ctx": 600, "abort_at": 2},
    ],
)
def test_prompt_scores_are_complete_after_small_passes_a_full_pool_or_an_aborted_pass(
    context_options: dict[str, int],
) -> None:
    alone = [prompt_scores_of(answers([prompt], n_ctx=600)[0][0]) for prompt in PROMPTS]
    found, engine = answers(PROMPTS * 2, n_seq_max=4, **context_options)
    assert [prompt_scores_of(answer) for answer in found] == alone * 2
    if context_options["n_ctx"] < 600:
        assert engine.scheduler.n_preemptions
