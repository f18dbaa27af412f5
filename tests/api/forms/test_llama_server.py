"""/completion and /infill as llama-server's clients call them."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.api.forms.unsupported_fields import UNSUPPORTED_FIELDS
from tests.fixtures.fakes import BOS, FakeModel
from tests.fixtures.server import Served
from tests.scripts.test_fuzz_http_requests import HUGE
from tests.serve.http.test_errors import post

# What llama-server's answer has (tools/server/README.md).
FIELDS = {
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}


def ask(served: Served, path: str = "/completion", **body: Any) -> Any:
    answer = httpx.post(f"{served.url}{path}", json={"prompt": "ask", **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(served: Served, path: str = "/completion", **body: Any) -> list[Any]:
    answer = httpx.post(
        f"{served.url}{path}", json={"prompt": "ask", "stream": True, **body}, timeout=30
    )
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    return [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines]


def test_an_answer_has_every_field_and_its_stream_the_same_text(
    serve: Callable[..., Served],
) -> None:
    served = serve(b"hello world")
    whole = ask(served, return_tokens=True)
    assert set(whole) == FIELDS
    assert (whole["content"], whole["stop"], whole["stop_type"], whole["stopping_word"]) == (
        "hello world",
        True,
        "eos",
        "",
    )
    assert whole["tokens"] == list(b"hello world")
    assert (whole["tokens_predicted"], whole["tokens_evaluated"], whole["prompt"]) == (
        11,
        4,
        "<s>ask",
    )
    *pieces, last = streamed(served)
    assert "".join(one["content"] for one in pieces) == "hello world"
    assert [token for one in pieces for token in one["tokens"]] == whole["tokens"]
    assert [one["tokens_predicted"] for one in pieces] == list(range(1, 12))
    assert not any(one["stop"] for one in pieces)
    assert (
        set(last) == FIELDS
        and last["stop"]
        and last["content"] == ""
        and last["timings"]["predicted_n"] == 11
    )


def test_why_it_ended(serve: Callable[..., Served]) -> None:
    served = serve(b"hello world")
    for body, content, sort, word in (
        ({"n_predict": 3}, "hel", "limit", ""),
        ({"stop": ["zz", " wor"]}, "hello", "word", " wor"),
        ({"n_predict": -1}, "hello world", "eos", ""),
        ({"n_predict": 0}, "", "limit", ""),
        ({"json_schema": {"const": 5}}, "5", "eos", ""),
    ):
        found = ask(served, **body)
        assert (found["content"], found["stop_type"], found["stopping_word"]) == (
            content,
            sort,
            word,
        )


def test_prompts_of_every_shape(serve: Callable[..., Served]) -> None:
    served = serve()
    shapes = {
        "ask": [BOS, *b"ask"],
        (97, 98): [97, 98],
        (97, "b", 99): list(b"abc"),
        ("a", 98): [BOS, *b"ab"],
    }
    for prompt, ids in shapes.items():
        value = prompt if isinstance(prompt, str) else list(prompt)
        assert ask(served, prompt=value)["tokens_evaluated"] == len(ids)
    assert ask(served, prompt={"prompt_string": "ask"})["prompt"] == "<s>ask"
    several = ask(served, prompt=["one", [97, 98], {"prompt_string": "three"}, [97, "x"]])
    assert [(one["index"], one["tokens_evaluated"]) for one in several] == [
        (0, 4),
        (1, 2),
        (2, 6),
        (3, 2),
    ]
    assert [one["content"] for one in ask(served, n_cmpl=2)] == ["hello"] * 2


def test_probabilities_biases_and_fields_that_are_wanted(serve: Callable[..., Served]) -> None:
    served = serve()
    found = ask(served, n_probs=2, n_predict=2)["completion_probabilities"]
    assert [(one["token"], len(one["top_logprobs"])) for one in found] == [("h", 2), ("e", 2)]
    assert [
        len(one["completion_probabilities"])
        for one in streamed(served, n_probs=2, n_predict=2)[:-1]
    ] == [1, 1]
    assert not ask(served, logit_bias=[[104, False], ["e", -50.5]], n_predict=1)[
        "content"
    ].startswith("h")
    assert ask(
        served,
        response_fields=["content", "generation_settings/n_predict", "nothing/here"],
        n_predict=2,
    ) == {
        "content": "he",
        "generation_settings/n_predict": 2,
    }


# Passed over: what steers a cache or a line that is ours to steer.
HARMLESS = {
    "cache_prompt": False,
    "id_slot": 0,
    "n_keep": 5,
    "n_cache_reuse": 256,
    "return_progress": True,
    "timings_per_token": True,
    "sse_ping_interval": 5,
    "min_keep": 0,
}
REFUSED = {
    **{name: 1 for name in UNSUPPORTED_FIELDS if name != "n_probs"},
    "suffix": "x",
    "post_sampling_probs": True,
    "echo": True,
    "logprobs": 2,
    "best_of": 3,
    "response_format": {"type": "json_object"},
    "beams": 2,
    "prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]},
    "logit_bias": [[1]],
    "n_predict": -2,
    "n_probs": 1000,
}


def test_every_other_field_is_harmless_or_refused_by_name(serve: Callable[..., Served]) -> None:
    served = serve()
    plain = ask(served)["content"]
    with httpx.Client() as asked:  # making one for each request is most of the time
        for name, value in HARMLESS.items():
            answer = asked.post(f"{served.url}/completion", json={"prompt": "ask", name: value})
            assert answer.json()["content"] == plain, name
        for name, value in REFUSED.items():
            answer = asked.post(f"{served.url}/completion", json={"prompt": "ask", name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    for pair in (f"[{HUGE}, 1]", f"[5, {HUGE}]", "[5, 1e308]"):
        assert (
            post(served, f'{{"prompt": "x", "logit_bias": [{pair}]}}'.encode(), "/completion")[0]
            == 400
        )


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model fills gaps, by tokens that are letters."""
    monkeypatch.setattr(
        FakeModel,
        "fim_tokens",
        {"pre": ord("P"), "suf": ord("S"), "mid": ord("M"), "sep": ord("F")},
    )


@pytest.mark.usefixtures("gaps")
def test_a_gap_is_told_as_llama_server_tells_it(serve: Callable[..., Served]) -> None:
    served = serve(b"hello", n_ctx=64)
    body = {"input_prefix": "def f():", "input_suffix": "end", "prompt": " x"}
    assert ask(served, "/infill", **body)["prompt"] == "Ffilename\n<s>Pdef f(): xSendM"
    more = {"input_extra": [{"filename": "a.py", "text": "y = 1"}, {"text": "z"}]}
    assert (
        ask(served, "/infill", **body, **more)["prompt"]
        == "Fa.py\ny = 1Ftmp\nzFfilename\n<s>Pdef f(): xSendM"
    )
    long = {"input_extra": [{"text": "y" * 200}], "n_predict": 10}
    found = ask(served, "/infill", **body, **long)
    assert (found["tokens_evaluated"], found["content"]) == (54, "hello")
    assert found["prompt"].endswith("yyFfilename\n<s>Pdef f(): xSendM")
    assert "".join(one["content"] for one in streamed(served, "/infill", **body)) == "hello"
    for wrong, words in (
        ({"input_suffix": None}, "input_suffix is missing"),
        ({"input_extra": ["x"]}, "an object"),
        ({"input_prefix": "x" * 90}, "context holds 64"),
    ):
        answer = httpx.post(f"{served.url}/infill", json={**body, **wrong})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_model_that_fills_no_gaps_says_so(tiny: Served) -> None:
    answer = httpx.post(f"{tiny.url}/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
    assert "fim_pre, fim_suf, fim_mid" in answer.json()["error"]["message"]
