"""`llmcli rerank`: the server's scores, for lines with documents and for one query."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from tests.commands.test_embed import kill_and_resume, read_rows, write_texts
from tests.fixtures.cli import Done
from tests.fixtures.server import serving
from tests.runtime import bert
from tests.serve.http.routes.test_rerank import head

Llmcli = Callable[..., Done]
DOCUMENTS = ["hello world", "the cat sat on a mat", "cats", "hello", "a mat"]


@pytest.fixture
def reranker(tmp_path: Path) -> Path:
    """A tiny BERT with a head for pairs."""
    return bert.bert(tmp_path / "rank.gguf", 4, None, head())


def post(model: Path, *bodies: dict[str, Any]) -> list[Any]:
    """Return the results of a server's /v1/rerank for these bodies."""
    options = RunOptions(ctx_size=64, threads=1)
    with (
        open_runner(model, options, native_sampling=False, needs_text=False) as runner,
        serving(runner) as served,
    ):
        answers = [httpx.post(f"{served.v1}/rerank", json=body, timeout=60) for body in bodies]
    return [answer.json()["results"] for answer in answers]


def same_results(found: list[Any], expected: list[Any]) -> None:
    assert [item["index"] for item in found] == [item["index"] for item in expected]
    assert [item["relevance_score"] for item in found] == pytest.approx(
        [item["relevance_score"] for item in expected], abs=1e-5
    )
    assert [item.get("document") for item in found] == [item.get("document") for item in expected]


def test_each_line_is_ranked_as_by_the_server(
    llmcli: Llmcli, reranker: Path, tmp_path: Path
) -> None:
    bodies = [
        {"query": "the cat", "documents": DOCUMENTS},
        {"query": "hello", "documents": [{"text": text} for text in DOCUMENTS[1:]], "top_n": 1},
        {"query": "mat", "documents": DOCUMENTS[:2], "return_documents": False},
    ]
    lines = [json.dumps({"custom_id": "a", **bodies[0]}), *map(json.dumps, bodies[1:])]
    source, out = write_texts(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    words = ("rerank", str(reranker), source, "-o", str(out), "-t", "1", "-c", "64")
    done = llmcli(*words, "--top", "2", "--return-documents")
    assert done.code == 0, done.err
    rows = read_rows(out)
    assert [row["custom_id"] for row in rows] == ["a", "line-2", "line-3"]
    defaults = {"top_n": 2, "return_documents": True}
    for row, expected in zip(
        rows, post(reranker, *[{**defaults, **b} for b in bodies]), strict=True
    ):
        same_results(row["results"], expected)
    assert "already complete" in llmcli(*words, "--top", "2", "--return-documents").out


def test_wrong_lines_are_named_and_the_others_are_ranked(
    llmcli: Llmcli, reranker: Path, tmp_path: Path
) -> None:
    lines = [
        '{"query": "cat", "documents": ["a", "cats"]}',
        '{"query": "cat"}',
        '["cat"]',
        json.dumps({"custom_id": "long", "query": "cat", "documents": ["cat " * 100]}),
        '{"query": 5, "documents": ["a"]}',
    ]
    source, out = write_texts(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = llmcli("rerank", str(reranker), source, "-o", str(out), "-t", "1", "-c", "64")
    assert done.code == 1 and "4 of 5 lines have no ranking" in done.err
    rows = read_rows(out)
    assert len(rows[0]["results"]) == 2
    assert [row["error"]["line"] for row in rows[1:]] == [2, 3, 4, 5]
    assert rows[3]["custom_id"] == "long"
    assert "this model ranks at most 64" in rows[3]["error"]["message"]


def test_a_query_ranks_all_lines_of_a_file(llmcli: Llmcli, reranker: Path, tmp_path: Path) -> None:
    documents = [*DOCUMENTS[:2], "cat " * 100, *DOCUMENTS[2:]]
    source, out = write_texts(tmp_path / "in.txt", documents), tmp_path / "out.jsonl"
    words = ("rerank", str(reranker), source, "-o", str(out), "-t", "1", "-c", "64")
    done = llmcli(*words, "--query", "the cat", "--top", "3", "--return-documents")
    assert done.code == 1 and "1 of 6 lines have no score" in done.err
    *found, failed = read_rows(out)
    (expected,) = post(
        reranker,
        {"query": "the cat", "documents": DOCUMENTS, "top_n": 3, "return_documents": True},
    )
    shifted = [{**item, "index": item["index"] + (item["index"] > 1)} for item in expected]
    same_results(found, shifted)
    assert (failed["index"], failed["error"]["line"]) == (2, 3)
    done = llmcli(*words, "--query", "the cat", "--top", "3", "--return-documents")
    assert done.code == 1 and "already complete" in done.out
    assert "already complete" not in llmcli(*words, "--query", "the cat").out


@pytest.mark.parametrize("query", [(), ("--query", "the cat")])
def test_a_killed_run_resumes_to_the_same_bytes(
    llmcli: Llmcli, reranker: Path, tmp_path: Path, query: tuple[str, ...]
) -> None:
    texts = [f"hello {'cat ' * (n * 7 % 13)}" for n in range(60)]
    lines = [
        json.dumps({"query": "a mat", "documents": texts[n : n + 5]} if not query else text)
        for n, text in enumerate(texts)
    ]
    words = ("rerank", str(reranker), write_texts(tmp_path / "in.jsonl", lines), "-t", "1", *query)
    whole = tmp_path / "whole"
    assert llmcli(*words, "-o", str(whole)).code == 0
    for count in (1, 30):
        kill_and_resume(llmcli, count, words, tmp_path / f"out{count}")
        assert (tmp_path / f"out{count}").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("IN", "-o", "OUT"), "this model does not rank", "--pooling rank"),
        (("IN",), "rerank needs a model", "-o OUT.jsonl"),
        (("IN", "-o", "OUT", "--format", "text"), "--format text", "--query TEXT"),
        (("EMPTY", "-o", "OUT", "--query", "a"), "there is no document", "one document"),
    ],
)
def test_mistakes_have_a_hint(
    llmcli: Llmcli, tmp_path: Path, words: tuple[str, ...], message: str, hint: str
) -> None:
    is_reranker = "EMPTY" in words
    model = bert.bert(
        tmp_path / "m.gguf", 4 if is_reranker else 1, None, head() if is_reranker else None
    )
    names = {
        "IN": write_texts(tmp_path / "in.jsonl", ['{"query": "a", "documents": ["a"]}']),
        "EMPTY": write_texts(tmp_path / "empty.txt", []),
        "OUT": str(tmp_path / "out"),
    }
    done = llmcli("rerank", str(model), *(names.get(word, word) for word in words))
    assert done.code in (1, 2)
    assert message in done.err and hint in done.err
