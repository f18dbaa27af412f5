"""/v1/embeddings with OpenAI's client, compared with the embedder itself."""

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
def bert_server(tmp_path: Path) -> Iterator[Served]:
    """Serve a tiny BERT."""
    options = RunOptions(ctx_size=256, threads=1)
    with open_runner(
        bert.bert(tmp_path / "bert.gguf"), options, native_sampling=False, needs_text=False
    ) as runner:
        with serving(runner) as served:
            yield served


def test_texts_and_their_token_ids_have_the_same_vectors(tiny: Served) -> None:
    embedder = tiny.bridge.runner.embedder()
    ids = [embedder.encode(text) for text in TEXTS]
    with client(tiny) as api:
        found = api.embeddings.create(model="tiny", input=TEXTS)  # the client requests base64
        floats = api.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        by_ids = api.embeddings.create(model="tiny", input=ids)
        single = api.embeddings.create(model="tiny", input=TEXTS[1])
        single_by_ids = api.embeddings.create(model="tiny", input=ids[1])
    vectors = [np.array(data.embedding) for data in found.data]
    assert [data.index for data in found.data] == [0, 1, 2]
    assert all(len(vector) == embedder.vector_size for vector in vectors)
    np.testing.assert_allclose([np.linalg.norm(vector) for vector in vectors], 1, atol=1e-6)
    for response in (floats, by_ids):
        np.testing.assert_allclose([data.embedding for data in response.data], vectors, atol=1e-6)
    for response in (single, single_by_ids):
        np.testing.assert_allclose(response.data[0].embedding, vectors[1], atol=1e-3)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))


def test_base64_is_little_endian_float32_and_dimensions_shortens_vectors(
    bert_server: Served,
) -> None:
    body = {"input": "hello world", "model": "tiny"}
    full = httpx.post(f"{bert_server.v1}/embeddings", json=body).json()["data"][0]["embedding"]
    packed = httpx.post(
        f"{bert_server.v1}/embeddings", json={**body, "encoding_format": "base64"}
    ).json()
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4"),
        np.array(full, np.float32),
    )
    with client(bert_server) as api:
        shortened = (
            api.embeddings.create(model="tiny", input="hello world", dimensions=8).data[0].embedding
        )
    np.testing.assert_allclose(shortened, normalize(np.array(full[:8])), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
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
def test_errors_name_the_problem(bert_server: Served, body: dict, message: str) -> None:
    answer = httpx.post(f"{bert_server.v1}/embeddings", json=body)
    assert answer.status_code == (404 if "served" in message else 400)
    assert message in answer.json()["error"]["message"]


def test_an_embedding_model_refuses_chat(bert_server: Served) -> None:
    with (
        client(bert_server) as api,
        pytest.raises(openai.BadRequestError, match="embedding model"),
    ):
        api.chat.completions.create(model="tiny", messages=HELLO)


def test_a_reranker_refuses_embeddings(tmp_path: Path) -> None:
    path = bert.bert(tmp_path / "bert.gguf", pooling=4)
    with open_runner(
        path, RunOptions(ctx_size=256, threads=1), native_sampling=False, needs_text=False
    ) as runner:
        with serving(runner) as served:
            answer = httpx.post(f"{served.v1}/embeddings", json={"input": "hello"})
    assert answer.status_code == 501 and "ranks pairs of texts" in answer.json()["error"]["message"]


def test_too_many_embedding_requests_are_refused(
    bert_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_queue, "MAX_WAITING", 0)
    answer = httpx.post(f"{bert_server.v1}/embeddings", json={"input": "hello"})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0


def test_tokenize_and_detokenize(serve: Callable[..., Served]) -> None:
    served = serve()
    post = lambda path, **body: httpx.post(f"{served.url}/{path}", json=body)  # noqa: E731
    assert post("tokenize", content="hé").json() == {"tokens": list("hé".encode())}
    assert post("tokenize", content="a", add_special=True).json() == {"tokens": [256, 97]}
    assert post("tokenize", content="é", with_pieces=True).json() == {
        "tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    }
    assert post("tokenize").json() == {"tokens": []}
    assert post("detokenize", tokens=list("hé".encode())).json() == {"content": "hé"}
    for wrong in (["a"], [-1], [10**9], [True]):
        assert post("detokenize", tokens=wrong).status_code == 400


def test_a_text_is_refused_if_memory_is_low(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_queue.host, "available_memory", lambda: 1000)
    tiny.bridge.runner.embedder().close()
    answer = httpx.post(f"{tiny.v1}/embeddings", json={"input": "a cat"})
    assert answer.status_code == 503 and "1000 B are free" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert httpx.post(f"{tiny.v1}/embeddings", json={"input": "a cat"}).status_code == 200
