"""/v1/rerank on a tiny BERT with a head, compared with transformers; and --pooling."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from llmcli.api import embeddings, rerank
from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from tests.fixtures.server import Served, serving
from tests.runtime import bert

DOCUMENTS = [
    "hello world",
    "the cat sat on a mat",
    "cats",
    "hello",
    *(f"hello {'cat ' * n}" for n in range(18)),
]
OPTIONS = RunOptions(
    ctx_size=256, threads=1, cache_type_k="f32", cache_type_v="f32", flash_attn="off"
)


def head() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {
        "cls.weight": (bert.HIDDEN, bert.HIDDEN),
        "cls.bias": (bert.HIDDEN,),
        "cls.output.weight": (1, bert.HIDDEN),
        "cls.output.bias": (1,),
    }
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def serve_reranker(path: Path, model: Any = None, **more: Any) -> Iterator[Served]:
    model_path = bert.bert(path, 4, model, head())
    with (
        open_runner(model_path, OPTIONS, native_sampling=False, needs_text=False) as runner,
        serving(runner, **more) as served,
    ):
        yield served


@pytest.fixture
def reranker(tmp_path: Path) -> Iterator[Served]:
    """Serve a tiny reranker."""
    yield from serve_reranker(tmp_path / "rank.gguf")


def test_too_many_tokens_are_refused_before_all_documents_are_tokenized() -> None:
    class LongEmbedder:
        max_tokens, n_calls = 100_000, 0

        def min_tokens(self, *texts: str) -> int:
            return 1

        def encode_pair(self, query: str, text: str) -> list[int]:
            self.n_calls += 1
            return [1] * self.max_tokens

    embedder: Any = LongEmbedder()
    with pytest.raises(
        ApiError, match="first 4 documents have 400,000 tokens; the limit is 300,000"
    ):
        rerank.encode_pairs(embedder, "a long query", ["a"] * 1000)
    assert embedder.n_calls == 4


def test_a_very_long_text_is_refused_without_tokenizing_it(tiny: Served) -> None:
    embedder = tiny.bridge.runner.embedder()
    text = "Once upon a time there was a cat. " * 1000
    assert embedder.max_tokens < embedder.min_tokens(text) < len(embedder.encode(text))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("encode", "encode_pair"):
            patch.setattr(embedder, name, lambda *_: pytest.fail("the text is tokenized"))
        for encode, message in (
            (lambda: embeddings.encode_texts([text], embedder), r"input\[0\] is too large: it has"),
            (
                lambda: rerank.encode_pairs(embedder, "cats", [text]),
                "document 0 and the query have",
            ),
        ):
            with pytest.raises(ApiError, match=rf"{message} \d+ tokens or more") as caught:
                encode()
            assert caught.value.code == "context_length_exceeded"


def post_rerank(served: Served, path: str = "/v1/rerank", **body: Any) -> httpx.Response:
    return httpx.post(served.url + path, json={"query": "the cat", "documents": DOCUMENTS, **body})


def test_scores_equal_the_head_applied_to_transformers_states(tmp_path: Path) -> None:
    torch, model, weights = pytest.importorskip("torch"), bert.oracle(), head()
    for served in serve_reranker(tmp_path / "rank.gguf", model):
        found = post_rerank(served).json()
        pair = served.bridge.runner.embedder().encode_pair
        ids = [pair("the cat", text) for text in DOCUMENTS]
    assert ids[0] == [2, 7, 8, 3, 5, 6, 3]  # [CLS] the cat [SEP] hello world [SEP]
    scores = []
    for item in ids:
        with torch.no_grad():
            first = model(torch.tensor([item])).last_hidden_state[0, 0].numpy()
        hidden = np.tanh(weights["cls.weight"] @ first + weights["cls.bias"])
        scores.append(
            float((weights["cls.output.weight"] @ hidden + weights["cls.output.bias"])[0])
        )
    by_index = {item["index"]: item["relevance_score"] for item in found["results"]}
    np.testing.assert_allclose(
        [by_index[index] for index in range(len(DOCUMENTS))], scores, atol=1e-4
    )
    ordered = [item["relevance_score"] for item in found["results"]]
    assert ordered == sorted(ordered, reverse=True)
    assert found["usage"]["total_tokens"] == sum(map(len, ids))


def test_responses_in_the_formats_of_jina_and_text_embeddings_inference(reranker: Served) -> None:
    ranking = post_rerank(reranker).json()["results"]
    assert [item["index"] for item in post_rerank(reranker, top_n=2).json()["results"]] == [
        item["index"] for item in ranking[:2]
    ]
    documents = [{"text": item} for item in DOCUMENTS]
    (best,) = post_rerank(reranker, top_n=1, return_documents=True, documents=documents).json()[
        "results"
    ]
    assert best["document"] == {"text": DOCUMENTS[ranking[0]["index"]]}
    tei_ranking = post_rerank(
        reranker, "/rerank", documents=None, texts=DOCUMENTS, return_text=True
    ).json()
    assert [item["index"] for item in tei_ranking] == [item["index"] for item in ranking]
    assert set(tei_ranking[0]) == {"index", "score", "text"}


@pytest.mark.parametrize(
    ("body", "message", "status"),
    [
        ({"query": None}, "query is missing", 400),
        ({"query": 5}, "query must be text", 400),
        ({"documents": None}, "documents is missing", 400),
        ({"documents": []}, "documents is missing", 400),
        ({"documents": ["a", 5]}, "documents[1] must be text", 400),
        ({"documents": [{}]}, "documents[0].text is missing", 400),
        ({"documents": None, "texts": [{"text": 5}]}, "texts[0].text must be text", 400),
        ({"documents": ["cat " * 70]}, "document 0 and the query have 75 tokens", 400),
        ({"documents": ["a"] * 1001}, "the limit is 1,000", 400),
        ({"top_n": 0}, "top_n must be", 400),
    ],
)
def test_errors_name_the_problem(
    reranker: Served, body: dict[str, Any], message: str, status: int
) -> None:
    answer = post_rerank(reranker, **body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), (
        answer.text
    )


def test_rerank_and_embeddings_need_the_right_model(reranker: Served, tiny: Served) -> None:
    answer = post_rerank(tiny)
    assert answer.status_code == 400 and "does not rank" in answer.json()["error"]["message"]
    answer = httpx.post(f"{reranker.v1}/embeddings", json={"input": "hello"})
    assert answer.status_code == 501 and "/v1/rerank" in answer.json()["error"]["message"]


def test_pooling_overrides_the_model_file(tmp_path: Path) -> None:
    model_path = bert.bert(tmp_path / "bert.gguf", 1)
    found = {}
    for pooling in (None, "mean", "cls", "last"):
        with open_runner(model_path, OPTIONS, native_sampling=False, needs_text=False) as runner:
            runner.pooling = pooling
            job = runner.embedder().start_job([runner.embedder().encode("the cat sat")])
            while job.step():
                pass
            found[pooling] = job.vectors[0]
    np.testing.assert_allclose(found[None], found["mean"], atol=1e-6)
    assert not np.allclose(found["mean"], found["cls"], atol=1e-3)
    assert not np.allclose(found["last"], found["cls"], atol=1e-3)
    model_path = bert.bert(tmp_path / "rank.gguf", 4, None, head())
    with open_runner(model_path, OPTIONS, native_sampling=False, needs_text=False) as runner:
        runner.pooling = "cls"
        with pytest.raises(UserError, match="ranks pairs"):
            runner.embedder()
    model_path = bert.bert(tmp_path / "no-head.gguf", 1)
    with open_runner(model_path, OPTIONS, native_sampling=False, needs_text=False) as runner:
        runner.pooling = "rank"
        with pytest.raises(UserError, match="needs a head"):
            runner.embedder()


@pytest.mark.parametrize(
    ("labels", "pooling"), [(("LABEL_0",), None), (("LABEL_0",), "rank"), (("yes", "no"), "rank")]
)
def test_rerankers_of_llama_cpps_converter_need_no_pooling_type(
    tmp_path: Path, labels: tuple[str, ...], pooling: str | None
) -> None:
    """The converter writes the labels of the classifier, and no pooling type. With several labels
    the model may be any classifier, so the user must say that it ranks.
    """
    weights = head()
    rows = np.concatenate([weights["cls.output.weight"], -weights["cls.output.weight"]])
    weights["cls.output.weight"] = rows[: len(labels)]
    weights["cls.output.bias"] = np.repeat(weights["cls.output.bias"], len(labels))
    path = bert.bert(tmp_path / "rank.gguf", 4, None, head())
    converted = bert.bert(tmp_path / "converted.gguf", None, None, weights, labels)
    found = []
    for file, kind in ((path, None), (converted, pooling)):
        with open_runner(file, OPTIONS, native_sampling=False, needs_text=False) as runner:
            runner.pooling = kind
            with serving(runner) as served:
                found.append(post_rerank(served).json()["results"])
    assert [item["index"] for item in found[0]] == [item["index"] for item in found[1]]
    np.testing.assert_allclose(
        [item["relevance_score"] for item in found[0]],
        [item["relevance_score"] for item in found[1]],
        atol=1e-5,
    )


def test_a_classifier_with_several_labels_ranks_only_if_the_user_says_so(tmp_path: Path) -> None:
    weights = head()
    weights["cls.output.weight"] = np.repeat(weights["cls.output.weight"], 3, 0)
    weights["cls.output.bias"] = np.repeat(weights["cls.output.bias"], 3)
    path = bert.bert(tmp_path / "classifier.gguf", None, None, weights, ("a", "b", "c"))
    with open_runner(path, OPTIONS, native_sampling=False, needs_text=False) as runner:
        assert runner.embedder().pooling == "mean"
        with serving(runner) as served:
            answer = post_rerank(served)
    assert "start the server with --pooling rank" in answer.json()["error"]["message"]
