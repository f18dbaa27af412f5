"""Answers whose context is full: they end, or with --context-shift the oldest tokens are dropped."""

import httpx2 as httpx
import pytest

from llmcli.runtime.runner import Runner
from tests.fixtures.server import Served, serving

TEXT = "Once upon a time there was a little girl called Lily. She loved to play in the park. " * 3


def complete(served: Served, **body: object) -> dict:
    answer = httpx.post(f"{served.url}/completion", json={"prompt": TEXT, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("max_context", [None, 128])
def test_an_answer_goes_on_if_the_context_slides(
    stories_runner: Runner, max_context: int | None
) -> None:
    size = max_context or stories_runner.n_ctx
    with serving(stories_runner, max_context=max_context, slides_context=True) as served:
        limit = size + 60
        found = complete(served, n_predict=limit, ignore_eos=True)
        assert found["tokens_predicted"] == limit
        assert found["truncated"] is True
        assert complete(served, n_predict=4)["truncated"] is False
        # without a limit an answer ends somewhere
        assert complete(served, ignore_eos=True)["tokens_predicted"] == size
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": limit}
        answer = httpx.post(
            f"{served.v1}/chat/completions", json={**chat, "ignore_eos": True}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == limit


def test_without_it_an_answer_ends_with_its_context(stories_runner: Runner) -> None:
    with serving(stories_runner, max_context=128) as served:
        for body in ({}, {"n_predict": 1000}, {"n_predict": -1}):
            found = complete(served, ignore_eos=True, **body)
            assert found["tokens_evaluated"] + found["tokens_predicted"] == 128
            assert (found["truncated"], found["stop_type"]) == (True, "limit")


def test_a_prompt_that_is_too_long_is_refused_in_any_case(stories_runner: Runner) -> None:
    for slides in (False, True):
        with serving(stories_runner, max_context=64, slides_context=slides) as served:
            answer = httpx.post(f"{served.url}/completion", json={"prompt": TEXT})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error")
            assert "exceeds the available context size" in error["message"]
            assert error["n_ctx"] == 64


@pytest.mark.parametrize("n_keep", [0, 20, -1])
def test_n_keep_tokens_stay(
    stories_runner: Runner, monkeypatch: pytest.MonkeyPatch, n_keep: int
) -> None:
    kept: list[int] = []
    with serving(stories_runner, max_context=128, slides_context=True) as served:
        submit = stories_runner.engine.submit_samples

        def record(request: object, count: int) -> list[int]:
            kept.append(request.overflow.n_kept)  # type: ignore[attr-defined]
            return submit(request, count)  # type: ignore[arg-type]

        monkeypatch.setattr(stories_runner.engine, "submit_samples", record)
        found = complete(served, n_keep=n_keep, n_predict=150, ignore_eos=True)
    assert found["tokens_predicted"] == 150
    assert kept == [{0: 4, 20: 21, -1: found["tokens_evaluated"]}[n_keep]]


def test_several_answers_to_one_prompt_do_not_slide(stories_runner: Runner) -> None:
    with serving(stories_runner, max_context=128, slides_context=True) as served:
        body = {"prompt": "Once", "n": 2, "max_tokens": 500, "ignore_eos": True}
        answer = httpx.post(f"{served.v1}/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] < 2 * 128
