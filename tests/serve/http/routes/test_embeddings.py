"""/v1/embeddings with OpenAI's client, compared with the embedder without a server."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import openai
import pytest

from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.scoring.embedder import normalize
from llmcli.serve.engine_thread import embedding_queue
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served, serving
from tests.runtime import bert

TEXTS = ["Once upon a time", "a cat", "a little girl named Lily"]


@pytest.fixture
def embeds(tmp_path: Path) -> Iterator[Served]:
    """A tiny BERT, served."""
    options = RunOptions(ctx_size=256, threads=1)
    with open_runner(
        bert.bert(tmp_path / "bert.gguf"), options, native_sampling=False, needs_text=False
    ) as runner:
        with serving(runner) as served:
            yield served


def test_texts_and_their_ids_become_the_same_vectors_in_order(tiny: Served) -> None:
    embedder = tiny.bridge.runner.embedder()
    ids = [embedder.encode(text) for text in TEXTS]
    with client(tiny) as asked:
        found = asked.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
        floats = asked.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        by_ids = asked.embeddings.create(model="tiny", input=ids)
        one = asked.embeddings.create(model="tiny", input=TEXTS[1])
        of_ids = asked.embeddings.create(model="tiny", input=ids[1])
    vectors = [np.array(data.embedding) for data in found.data]
    assert [data.index for data in found.data] == [0, 1, 2]
    assert all(len(vector) == embedder.vector_size for vector in vectors)
    np.testing.assert_allclose([np.linalg.norm(vector) for vector in vectors], 1, atol=1e-6)
    for other in (floats, by_ids):
        np.testing.assert_allclose([data.embedding for data in other.data], vectors, atol=1e-6)
    for other in (one, of_ids):
        np.testing.assert_allclose(other.data[0].embedding, vectors[1], atol=1e-3)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))


def test_the_bytes_are_little_endian_float32_and_a_vector_can_be_cut(embeds: Served) -> None:
    asked = {"input": "hello world", "model": "tiny"}
    whole = httpx.post(f"{embeds.v1}/embeddings", json=asked).json()["data"][0]["embedding"]
    packed = httpx.post(
        f"{embeds.v1}/embeddings", json={**asked, "encoding_format": "base64"}
    ).json()
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4"),
        np.array(whole, np.float32),
    )
    with client(embeds) as talking:
        cut = (
            talking.embeddings.create(model="tiny", input="hello world", dimensions=8)
            .data[0]
            .embedding
        )
    np.testing.assert_allclose(cut, normalize(np.array(whole[:8])), atol=1e-6)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"input": ""}, "input[0] is empty"),
        ({"input": []}, "input must be text"),
        ({"input": 5}, "input must be text"),
        ({"input": ["a", 5]}, "input[1] must be text or token ids"),
        ({"input": [[5, "a"]]}, "input[0] must be"),
        ({"input": [[]]}, "input[0] is empty"),
        ({"input": [99]}, "99 is not a token"),
        ({"input": [-1]}, "-1 is not a token"),
        ({"input": [[5] * 65]}, "65 tokens; this model embeds at most 64"),
        ({}, "input is missing"),
        ({"input": "hello", "dimensions": 33}, "dimensions must be a whole number from 1 to 32"),
        (
            {"input": "hello", "encoding_format": "int8"},
            "encoding_format must be one of float, base64",
        ),
        ({"input": "hello", "model": "other"}, "not served here"),
        ({"input": ["a"] * 2049}, "2,049 texts; the limit is 2,048"),
    ],
)
def test_what_is_wrong_is_told(embeds: Served, more: dict, told: str) -> None:
    answer = httpx.post(f"{embeds.v1}/embeddings", json=more)
    assert answer.status_code == (404 if "served" in told else 400)
    assert told in answer.json()["error"]["message"]


def test_a_model_made_for_embeddings_answers_no_chat(embeds: Served) -> None:
    with (
        client(embeds) as asked,
        pytest.raises(openai.BadRequestError, match="embedding model"),
    ):
        asked.chat.completions.create(model="tiny", messages=HELLO)


def test_a_model_that_ranks_embeds_nothing(tmp_path: Path) -> None:
    path = bert.bert(tmp_path / "bert.gguf", pooling=4)
    with open_runner(
        path, RunOptions(ctx_size=256, threads=1), native_sampling=False, needs_text=False
    ) as runner:
        with serving(runner) as served:
            answer = httpx.post(f"{served.v1}/embeddings", json={"input": "hello"})
    assert answer.status_code == 501 and "ranks pairs of texts" in answer.json()["error"]["message"]


def test_too_many_at_once_are_sent_away(embeds: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_queue, "MAX_WAITING", 0)
    answer = httpx.post(f"{embeds.v1}/embeddings", json={"input": "hello"})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0


def test_tokens_and_their_text(serve: Callable[..., Served]) -> None:
    served = serve()
    ask = lambda path, **body: httpx.post(f"{served.url}/{path}", json=body)  # noqa: E731
    assert ask("tokenize", content="hé").json() == {"tokens": list("hé".encode())}
    assert ask("tokenize", content="a", add_special=True).json() == {"tokens": [256, 97]}
    assert ask("tokenize", content="é", with_pieces=True).json() == {
        "tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    }
    assert ask("tokenize").json() == {"tokens": []}
    assert ask("detokenize", tokens=list("hé".encode())).json() == {"content": "hé"}
    for wrong in (["a"], [-1], [10**9], [True]):
        assert ask("detokenize", tokens=wrong).status_code == 400


def test_a_text_that_the_machine_has_no_memory_for_is_refused(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_queue.host, "available_memory", lambda: 1000)
    tiny.bridge.runner.embedder().close()
    answer = httpx.post(f"{tiny.v1}/embeddings", json={"input": "a cat"})
    assert answer.status_code == 503 and "1000 B are free" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert httpx.post(f"{tiny.v1}/embeddings", json={"input": "a cat"}).status_code == 200
