"""/completion and /infill respond like llama-server."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from tests.fixtures.fakes import BOS, FakeModel
from tests.fixtures.server import Served
from tests.scripts.test_fuzz_http_requests import HUGE
from tests.serve.http.test_errors import post

# The fields of llama-server's response (tools/server/README.md).
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


def post_json(served: Served, path: str = "/completion", **body: Any) -> Any:
    answer = httpx.post(f"{served.url}{path}", json={"prompt": "ask", **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post_stream(served: Served, path: str = "/completion", **body: Any) -> list[Any]:
    answer = httpx.post(
        f"{served.url}{path}", json={"prompt": "ask", "stream": True, **body}, timeout=30
    )
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    return [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines]


def test_a_response_has_every_field_and_its_stream_the_same_text(
    serve: Callable[..., Served],
) -> None:
    served = serve(b"hello world")
    complete = post_json(served, return_tokens=True)
    assert set(complete) == FIELDS
    assert (
        complete["content"],
        complete["stop"],
        complete["stop_type"],
        complete["stopping_word"],
    ) == (
        "hello world",
        True,
        "eos",
        "",
    )
    assert complete["tokens"] == list(b"hello world")
    assert (complete["tokens_predicted"], complete["tokens_evaluated"], complete["prompt"]) == (
        11,
        4,
        "<s>ask",
    )
    *pieces, last = post_stream(served)
    assert "".join(entry["content"] for entry in pieces) == "hello world"
    assert [token for entry in pieces for token in entry["tokens"]] == complete["tokens"]
    assert [entry["tokens_predicted"] for entry in pieces] == list(range(1, 12))
    assert not any(entry["stop"] for entry in pieces)
    assert (
        set(last) == FIELDS
        and last["stop"]
        and last["content"] == ""
        and last["timings"]["predicted_n"] == 11
    )


def test_stop_types(serve: Callable[..., Served]) -> None:
    served = serve(b"hello world")
    for body, content, stop_type, stopping_word in (
        ({"n_predict": 3}, "hel", "limit", ""),
        ({"stop": ["zz", " wor"]}, "hello", "word", " wor"),
        ({"n_predict": -1}, "hello world", "eos", ""),
        ({"n_predict": 0}, "", "limit", ""),
        ({"json_schema": {"const": 5}}, "5", "eos", ""),
    ):
        found = post_json(served, **body)
        assert (found["content"], found["stop_type"], found["stopping_word"]) == (
            content,
            stop_type,
            stopping_word,
        )


def test_prompts_of_all_types(serve: Callable[..., Served]) -> None:
    served = serve()
    shapes = {
        "ask": [BOS, *b"ask"],
        (97, 98): [97, 98],
        (97, "b", 99): list(b"abc"),
        ("a", 98): [BOS, *b"ab"],
    }
    for prompt, ids in shapes.items():
        value = prompt if isinstance(prompt, str) else list(prompt)
        assert post_json(served, prompt=value)["tokens_evaluated"] == len(ids)
    assert post_json(served, prompt={"prompt_string": "ask"})["prompt"] == "<s>ask"
    several = post_json(served, prompt=["one", [97, 98], {"prompt_string": "three"}, [97, "x"]])
    assert [(entry["index"], entry["tokens_evaluated"]) for entry in several] == [
        (0, 4),
        (1, 2),
        (2, 6),
        (3, 2),
    ]
    assert [entry["content"] for entry in post_json(served, n_cmpl=2)] == ["hello"] * 2


def test_n_probs_logit_bias_and_response_fields(serve: Callable[..., Served]) -> None:
    served = serve()
    found = post_json(served, n_probs=2, n_predict=2)["completion_probabilities"]
    assert [(entry["token"], len(entry["top_logprobs"])) for entry in found] == [("h", 2), ("e", 2)]
    assert [
        len(entry["completion_probabilities"])
        for entry in post_stream(served, n_probs=2, n_predict=2)[:-1]
    ] == [1, 1]
    assert not post_json(served, logit_bias=[[104, False], ["e", -50.5]], n_predict=1)[
        "content"
    ].startswith("h")
    assert post_json(
        served,
        response_fields=["content", "generation_settings/n_predict", "nothing/here"],
        n_predict=2,
    ) == {
        "content": "he",
        "generation_settings/n_predict": 2,
    }


# Ignored fields, which only control a cache or the connection.
HARMLESS = {
    "cache_prompt": False,
    "id_slot": 0,
    "n_keep": 5,
    "n_cache_reuse": 256,
    "sse_ping_interval": 5,
    "min_keep": 0,
    "top_k": -1,
    "repeat_last_n": -1,
    "max_tokens": -1,
    "t_max_predict_ms": -1,
    "samplers": ["top_k", "temperature"],
    "n_indent": 0,
}
REFUSED = {
    "suffix": "x",
    "echo": True,
    "best_of": 3,
    "lora": [{"id": 0, "scale": 0.5}],
    "grammar_lazy": True,
    "reasoning_budget_tokens": 5,
    "beams": 2,
    "prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]},
    "logit_bias": [[1]],
    "n_predict": -2,
    "n_probs": 1000,
    "samplers": ["top_kk"],
    "max_new_tokens": 5,
}


def test_other_fields_are_ignored_or_refused_by_name(serve: Callable[..., Served]) -> None:
    served = serve()
    plain = post_json(served)["content"]
    with httpx.Client() as http:  # a new client for each request would be slow
        for name, value in HARMLESS.items():
            answer = http.post(f"{served.url}/completion", json={"prompt": "ask", name: value})
            assert answer.json()["content"] == plain, name
        for name, value in REFUSED.items():
            answer = http.post(f"{served.url}/completion", json={"prompt": "ask", name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"].split("[")[0]) == (400, name), error
    for pair in (f"[{HUGE}, 1]", f"[5, {HUGE}]", "[5, 1e308]"):
        assert (
            post(served, f'{{"prompt": "x", "logit_bias": [{pair}]}}'.encode(), "/completion")[0]
            == 400
        )


@pytest.fixture
def infill_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the fake model infill tokens, which are letters."""
    monkeypatch.setattr(
        FakeModel,
        "fim_tokens",
        {"pre": ord("P"), "suf": ord("S"), "mid": ord("M"), "sep": ord("F")},
    )


@pytest.mark.usefixtures("infill_tokens")
def test_the_infill_prompt_is_that_of_llama_server(serve: Callable[..., Served]) -> None:
    served = serve(b"hello", n_ctx=64)
    body = {"input_prefix": "def f():", "input_suffix": "end", "prompt": " x"}
    assert post_json(served, "/infill", **body)["prompt"] == "Ffilename\n<s>Pdef f(): xSendM"
    more = {"input_extra": [{"filename": "a.py", "text": "y = 1"}, {"text": "z"}]}
    assert (
        post_json(served, "/infill", **body, **more)["prompt"]
        == "Fa.py\ny = 1Ftmp\nzFfilename\n<s>Pdef f(): xSendM"
    )
    long = {"input_extra": [{"text": "y" * 200}], "n_predict": 10}
    found = post_json(served, "/infill", **body, **long)
    assert (found["tokens_evaluated"], found["content"]) == (54, "hello")
    assert found["prompt"].endswith("yyFfilename\n<s>Pdef f(): xSendM")
    assert "".join(entry["content"] for entry in post_stream(served, "/infill", **body)) == "hello"
    for wrong, message in (
        ({"input_suffix": None}, "input_suffix is missing"),
        ({"input_extra": ["x"]}, "an object"),
        ({"input_prefix": "x" * 90}, "context holds 64"),
    ):
        answer = httpx.post(f"{served.url}/infill", json={**body, **wrong})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_infill_needs_a_model_with_infill_tokens(tiny: Served) -> None:
    answer = httpx.post(f"{tiny.url}/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
    assert "fim_pre, fim_suf, fim_mid" in answer.json()["error"]["message"]


def test_biases_are_objects_and_forbid_the_end_with_ignore_eos(
    serve: Callable[..., Served],
) -> None:
    served = serve()

    def biases(**fields: object) -> list[dict[str, object]]:
        return post_json(served, n_predict=2, **fields)["generation_settings"]["logit_bias"]

    assert biases() == []
    chosen = {"token": 97, "bias": 1.5}, {"token": 98, "bias": None}
    assert biases(logit_bias=[[97, 1.5], [98, False]]) == list(chosen)
    *kept, end = biases(logit_bias=[[97, 1.5], [98, False]], ignore_eos=True)
    assert kept == list(chosen)
    assert end["bias"] is None and served.bridge.runner.model.is_end(end["token"])


def test_completions_without_v1_is_llama_servers_endpoint(serve: Callable[..., Served]) -> None:
    served = serve(b"hello")
    body = {"prompt": "ask", "n_predict": 3}
    found = httpx.post(f"{served.url}/completions", json=body, timeout=60).json()
    assert (found["content"], "choices" in found) == ("hel", False)
    streamed = httpx.post(f"{served.url}/completions", json={**body, "stream": True}, timeout=60)
    assert b'"content":"h"' in streamed.content.replace(b": ", b":")
    openai_form = httpx.post(f"{served.v1}/completions", json={"prompt": "ask"}, timeout=60).json()
    assert openai_form["choices"][0]["text"] == "hello"
