"""Every field of OpenAI's API, llama-server and vLLM changes the answer, is harmless, or is refused
by name.
"""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.api.forms.unsupported_fields import UNSUPPORTED_FIELDS
from tests.api.forms.test_openai_chat import HELLO
from tests.fixtures.server import Served

# field -> a value, and whether the answer differs from the answer without the field
OPENAI: dict[str, tuple[Any, bool]] = {
    "max_completion_tokens": (2, True),
    "max_tokens": (2, True),
    "stop": ("l", True),
    "n": (2, True),
    "logprobs": (True, True),
    "response_format": ({"type": "json_object"}, True),
    "reasoning_effort": ("low", False),
    "parallel_tool_calls": (False, False),
    "store": (True, False),
    "metadata": ({"a": "b"}, False),
    "service_tier": ("auto", False),
    "modalities": (["text"], False),
    "prediction": ({"type": "content", "content": "hello"}, False),
    "verbosity": ("medium", False),
    "prompt_cache_key": ("k", False),
    "prompt_cache_retention": ("24h", False),
    "safety_identifier": ("me", False),
    "user": ("me", False),
    "seed": (7, False),
    "presence_penalty": (0, False),
    "frequency_penalty": (0, False),
    "top_p": (0.9, False),
    "temperature": (0, False),
    "logit_bias": ({}, False),
    "stream_options": (None, False),
}
OTHERS: dict[str, tuple[Any, bool]] = {
    "cache_prompt": (True, False),
    "id_slot": (-1, False),
    "timings_per_token": (True, False),
    "min_p": (0.1, False),
    "return_progress": (True, False),
    "top_k": (5, False),
    "repeat_penalty": (1.0, False),
    "n_probs": (0, False),
    "t_max_predict_ms": (-1, False),
    "min_tokens": (0, False),
    "guided_json": (None, False),
    "typical_p": (1, False),
    "dry_multiplier": (0, False),
    "xtc_probability": (0, False),
    "mirostat": (0, False),
    "priority": (1, False),
    "repetition_penalty": (1.0, False),
    "ignore_eos": (False, False),
    "chat_template_kwargs": ({}, False),
}
REFUSED = {
    **dict.fromkeys(UNSUPPORTED_FIELDS, 1),
    "verbosity": "high",
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "web_search_options": {"a": 1},
    "functions": [{}],
    "function_call": "auto",
}


def post_chat(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{served.v1}/chat/completions",
        json={"messages": HELLO, "max_completion_tokens": 40, **body},
    )


def choices_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("fields", [OPENAI, OTHERS], ids=["openai", "others"])
def test_a_field_changes_the_answer_or_is_harmless(
    serve: Callable[..., Served], fields: dict
) -> None:
    served = serve()
    plain = choices_of(post_chat(served))
    for name, (value, changes) in fields.items():
        body = {name: value, **({"max_completion_tokens": None} if name == "max_tokens" else {})}
        assert (choices_of(post_chat(served, **body)) != plain) == changes, name


def test_unsupported_fields_are_refused_by_name(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    for name, value in REFUSED.items():
        answer = post_chat(served, **{name: value})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == name
        assert name in answer.json()["error"]["message"]
