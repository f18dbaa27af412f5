"""/v1/embeddings with OpenAI's client, compared with the embedder itself."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from llmcli.hardware import host
from llmcli.runtime.binding.contexts.pooled_context import PooledContext
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.scoring.embedder import PASS_TOKENS, normalize
from llmcli.serve.engine_thread.client_shares import ClientShares
from llmcli.serve.engine_thread.engine_watch import EngineWatch
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
        ({"input": []}, "input is an empty list: give at least one text"),
        ({"input": 5}, "input must be text"),
        ({"input": ["a", 5.5]}, "input[1] must be text, token ids"),
        ({"input": [[5, True]]}, "input[0] must be"),
        ({"input": [[]]}, "input[0] is empty"),
        ({"input": {"content": "hello"}}, "input[0].content must be a list"),
        ({"input": {"content": []}}, "input[0].content is missing"),
        ({"input": {"content": [{"type": "text"}]}}, "input[0].content[0].text is missing"),
        ({"input": {"content": [{"type": "image_url"}]}}, "reads only text, not image_url"),
        ({"input": {"prompt_string": "a", "multimodal_data": ["x"]}}, "reads only text"),
        ({"input": {"prompt_string": 5}}, "input[0].prompt_string must be text, not 5"),
        ({"input": "hello", "truncate_prompt_tokens": 0}, "leaves no text"),
        ({"input": "hello", "embd_normalize": -2}, "embd_normalize must be"),
        ({"input": [99]}, "99 is not a token"),
        ({"input": [-1]}, "-1 is not a token"),
        ({"input": [[5] * 65]}, "65 tokens; this model embeds at most 64"),
        ({}, "input is missing"),
        ({"input": "hello", "dimensions": 33}, "dimensions must be a whole number from 1 to 32"),
        (
            {"input": "hello", "encoding_format": "int8"},
            "encoding_format must be one of float, base64",
        ),
        ({"input": ["a"] * 2049}, "2,049 texts; the limit is 2,048"),
    ],
)
def test_errors_name_the_problem(bert_server: Served, body: dict, message: str) -> None:
    answer = httpx.post(f"{bert_server.v1}/embeddings", json=body)
    assert answer.status_code == (404 if "served" in message else 400)
    assert message in answer.json()["error"]["message"]


def test_all_forms_of_an_input_are_accepted(bert_server: Served) -> None:
    """As llama-server does: mixed lists, objects with text, and a text without any words."""

    def vectors(entry: Any) -> list[list[float]]:
        answer = httpx.post(f"{bert_server.v1}/embeddings", json={"input": entry})
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    (whole,) = vectors("hello world")
    assert len(whole) == bert.HIDDEN
    for entry in (
        [2, 5, 6, 3],
        {"prompt_string": "hello world"},
        {"prompt_string": "hello world", "prompt_strings": "unknown"},
        {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]},
    ):
        np.testing.assert_allclose(vectors(entry), [whole], atol=1e-6)
    mixed = ["hello world", [2, 5, 6, 3], {"prompt_string": "hello world"}]
    np.testing.assert_allclose(vectors(mixed), [whole] * 3, atol=1e-6)
    # a text inside a list of token ids gets no special tokens, unless it is the first
    np.testing.assert_allclose(vectors([2, "hello", 6, 3]), [whole], atol=1e-6)
    np.testing.assert_allclose(vectors([["hello", 6]]), vectors([[2, 5, 3, 6]]), atol=1e-6)
    np.testing.assert_allclose(vectors(""), vectors([[2, 3]]), atol=1e-6)


def test_embd_normalize_is_that_of_llama_cpp(bert_server: Served) -> None:
    def embed(**body: Any) -> np.ndarray:
        (item,) = httpx.post(
            f"{bert_server.url}/embedding", json={"content": "hello world", **body}
        ).json()
        (vector,) = item["embedding"]
        return np.array(vector)

    raw = embed(embd_normalize=-1)
    assert abs(np.linalg.norm(raw) - 1) > 1e-3
    np.testing.assert_allclose(embed(), raw / np.linalg.norm(raw), atol=1e-6)
    np.testing.assert_allclose(embed(embd_normalize=2), embed(), atol=1e-6)
    np.testing.assert_allclose(embed(embd_normalize=1), raw / np.abs(raw).sum(), atol=1e-6)
    np.testing.assert_allclose(embed(embd_normalize=0), raw / np.abs(raw).max() * 32760, rtol=1e-5)
    assert embed(dimensions=8).shape == (8,)


def test_pooling_none_gives_a_vector_of_each_token(tmp_path: Path) -> None:
    torch, model = pytest.importorskip("torch"), bert.oracle()
    path = bert.bert(tmp_path / "bert.gguf", model=model)
    with open_runner(
        path,
        RunOptions(
            ctx_size=256, threads=1, cache_type_k="f32", cache_type_v="f32", flash_attn="off"
        ),
        native_sampling=False,
        needs_text=False,
    ) as runner:
        runner.pooling = "none"
        with serving(runner) as served:
            body = {"input": ["hello world", "cats"]}
            found = [
                httpx.post(f"{served.url}{name}", json=body).json()
                for name in ("/embeddings", "/embedding")
            ]
            refused = httpx.post(f"{served.v1}/embeddings", json=body)
            dimensions = httpx.post(f"{served.url}/embedding", json={**body, "dimensions": 4})
    assert found[0] == found[1]
    assert (refused.status_code, "use /embedding" in refused.text) == (400, True)
    assert (dimensions.status_code, "leave out dimensions" in dimensions.text) == (400, True)
    for item, ids in zip(found[0], ([2, 5, 6, 3], [2, 8, 10, 3]), strict=True):
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(item["embedding"], states, atol=1e-4)


def test_too_many_vectors_of_tokens_are_refused(
    bert_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = bert_server.bridge.runner.embedder()
    monkeypatch.setattr(embedder, "pooling", "none")
    monkeypatch.setattr("llmcli.api.embeddings.MAX_TOKEN_VALUES", 3 * bert.HIDDEN)
    answer = httpx.post(f"{bert_server.url}/embedding", json={"input": "hello world"})
    assert "input has 4 tokens; the limit is 3" in answer.json()["error"]["message"]


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


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_watchdog_knows_the_rows_of_a_pass(
    tmp_path: Path, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch, is_causal: bool
) -> None:
    """They do not depend on the batch size of answers."""
    path = stories_gguf if is_causal else bert.bert(tmp_path / "bert.gguf")
    rows, limits = list[int](), list[int]()
    compute, begin = PooledContext.compute_vectors, EngineWatch.begin

    def spy_compute(context: PooledContext, batch: BatchRows) -> Any:
        rows.append(len(batch))
        return compute(context, batch)

    def spy_begin(watch: EngineWatch, max_rows: int = 0) -> None:
        limits.append(max_rows)
        begin(watch, max_rows)

    monkeypatch.setattr(PooledContext, "compute_vectors", spy_compute)
    monkeypatch.setattr(EngineWatch, "begin", spy_begin)
    options = RunOptions(ctx_size=256, threads=1, batch_size=2048 if is_causal else 16)
    with open_runner(path, options, native_sampling=False, needs_text=False) as runner:
        with serving(runner) as served:
            body = {"input": ["hello " * 7] * 5, "model": "tiny"}
            assert httpx.post(f"{served.v1}/embeddings", json=body).status_code == 200
    assert max(rows) <= max(limits) <= (PASS_TOKENS if is_causal else bert.CONTEXT)


def test_too_many_embedding_requests_are_refused(
    bert_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientShares, "take_places", lambda *_: False)
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
    monkeypatch.setattr(host, "available_memory", lambda: 1000)
    tiny.bridge.runner.embedder().close()
    answer = httpx.post(f"{tiny.v1}/embeddings", json={"input": "a cat"})
    assert answer.status_code == 503 and "1000 B are free" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert httpx.post(f"{tiny.v1}/embeddings", json={"input": "a cat"}).status_code == 200
