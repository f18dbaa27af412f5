"""Drafts of each method that can be trees, with llama.cpp: greedy answers are plain ones, paths of any
rank are kept, and the layers that read hidden states get those of the kept path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import exp, sqrt
from pathlib import Path

import pytest

from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.drafting.draft_files.heads_file import HEAD_METHODS, MEDUSA, HeadShapes
from llmcli.runtime.drafting.gain.acceptance import Acceptance
from llmcli.runtime.drafting.guesses.pass_rows import find_text_rows
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.requests.token_tree import TokenTree
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.strategies.speculative import SpeculativeStrategy
from tests.fixtures.draft_heads import write_heads
from tests.fixtures.small_runner import (
    answer,
    check_drafted_cells,
    draft_always,
    ids,
    make_request,
    open_small,
)
from tests.quant import tiny_gguf

CHANCES = (0.4, 0.3, 0.2, 0.1)
HIDDEN, N_VOCAB = 64, 300  # of the model
METHODS = ("model", "eagle3", "lookahead", *HEAD_METHODS)
FOUR = range(10, 14)
ONLY_FOUR = tuple(f"{token}+100" for token in FOUR)
PROMPTS = (list(range(3, 40)), list(range(90, 100)))


@pytest.fixture(autouse=True)
def trees_are_always_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runtime.open_speculation._pays", lambda cost, max_rows: True)
    monkeypatch.setattr("llmcli.runtime.drafting.hidden_state_drafter.MIN_PROBABILITY", 0.0)
    monkeypatch.setattr(
        Acceptance,
        "chances",
        lambda self, n_depths, n_ranks=1: [list(CHANCES[:n_ranks])] * n_depths,
    )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TokenTree, list[int]]]:
    """The trees that were checked, with the nodes that were right."""
    found: list[tuple[TokenTree, list[int]]] = []
    keep_path = SpeculativeStrategy._keep_path

    def record(
        self: SpeculativeStrategy, sequence: Sequence, start: int, tree: TokenTree, path: list[int]
    ) -> None:
        found.append((tree, list(path)))
        keep_path(self, sequence, start, tree, path)

    monkeypatch.setattr(SpeculativeStrategy, "_keep_path", record)
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of six layers."""
    path = tmp_path_factory.mktemp("target") / "m.gguf"
    return tiny_gguf.llama(path, hidden=HIDDEN, ff=128, layers=6)


@contextmanager
def open_drafting(target: Path, method: str, folder: Path, ctx_size: int = 512) -> Iterator[Runner]:
    """Open a model that drafts trees of eleven tokens with a method."""
    model: Path | None = None
    if method == "eagle3":
        model = tiny_gguf.eagle3(folder / "d.gguf")
    elif method == "model":
        model = tiny_gguf.llama(folder / "d.gguf", hidden=64, ff=128, layers=1)
    elif method in HEAD_METHODS:
        model = folder / "d.gguf"
        n_hidden = 0 if method == MEDUSA else 16
        write_heads(model, HeadShapes(method, HIDDEN, N_VOCAB, 3, 1, n_hidden, False), target)
    drafting = DraftSettings(method=method, model=model)
    with open_small(target, drafting, ctx_size=ctx_size) as runner:
        assert runner.context.max_branches >= 8
        draft_always(runner, 15 if method == "lookahead" else 11)
        yield runner


@pytest.mark.parametrize("method", METHODS)
def test_greedy_answers_are_those_of_plain_decoding(
    target: Path, method: str, tmp_path: Path, kept: list[tuple[TokenTree, list[int]]]
) -> None:
    with open_small(target, NO_DRAFTING) as plain:
        expected = [ids(answer(plain, prompt)) for prompt in PROMPTS]
    with open_drafting(target, method, tmp_path) as runner:
        assert [ids(answer(runner, prompt)) for prompt in PROMPTS] == expected
    assert sum(not tree.is_chain for tree, _ in kept) > 10


@pytest.mark.parametrize("method", METHODS)
def test_the_answer_in_a_full_context_is_that_of_plain_decoding(
    target: Path, method: str, tmp_path: Path
) -> None:
    with open_small(target, NO_DRAFTING, ctx_size=256) as plain:
        expected = answer(plain, PROMPTS[0], 300)
    with open_drafting(target, method, tmp_path, ctx_size=256) as runner:
        found = answer(runner, PROMPTS[0], 300)
    assert (ids(found), found.finish) == (ids(expected), "context_full")
    assert found.n_drafted


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_is_cancelled_before_a_tree_is_checked_leaves_the_drafter_usable(
    target: Path, method: str, tmp_path: Path
) -> None:
    with open_small(target, NO_DRAFTING) as plain:
        expected = ids(answer(plain, PROMPTS[0]))
    with open_drafting(target, method, tmp_path) as runner:
        engine = runner.engine
        number = engine.submit(make_request(runner, PROMPTS[0]))
        for _ in range(6):
            engine.step()
        (sequence,) = engine.scheduler.running.values()
        assert sequence.draft
        engine.cancel(number)
        runner.context.interrupt()
        while engine.is_busy:
            engine.step()
        engine.check()
        assert engine.pop_answer(number).finish == "cancelled"
        assert ids(answer(runner, PROMPTS[0])) == expected


@pytest.mark.parametrize("method", ["model", "eagle3"])
def test_paths_of_any_rank_are_kept(
    target: Path,
    method: str,
    tmp_path: Path,
    kept: list[tuple[TokenTree, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four tokens are about equally likely, so that the guesses of all ranks are."""
    even = {"temp": 1.5, "logit_bias": ONLY_FOUR}
    with open_drafting(target, method, tmp_path) as runner:
        counts = None
        if method == "eagle3":
            (drafter,) = runner.engine.resources.speculation.drafters
            counts = check_drafted_cells(drafter, monkeypatch)
        for seed in range(4):
            assert len(ids(answer(runner, PROMPTS[0], 40, seed=seed, **even))) == 40
    n_other = sum(path != tree.main_path()[: len(path)] for tree, path in kept)
    assert n_other > 5
    assert counts is None or max(counts) > len(PROMPTS[0]) + 30


@pytest.mark.parametrize("method", ["model", "eagle3"])
def test_tokens_of_trees_are_drawn_with_the_probabilities_of_the_model(
    target: Path, method: str, tmp_path: Path, kept: list[tuple[TokenTree, list[int]]]
) -> None:
    """Only four tokens can be drawn. Each is drawn about as often as the sum of its probabilities."""
    values = {"temp": 1, "top_k": 0, "top_p": 1, "min_p": 0, "logit_bias": ONLY_FOUR}
    found, expected, variance = dict.fromkeys(FOUR, 0), dict.fromkeys(FOUR, 0.0), 0.0
    with open_drafting(target, method, tmp_path) as runner:
        for seed in range(20):
            request = make_request(runner, PROMPTS[0], 40, seed=seed, **values)
            stream = runner.reply(
                replace(request, logprobs=True, top_logprobs=runner.model.n_vocab)
            )
            list(stream)
            for token, scores in zip(ids(stream.answer), stream.answer.top_logprobs, strict=True):
                found[token] += 1
                weights = {top.token: exp(top.logprob) for top in scores if top.token in FOUR}
                for other, weight in weights.items():
                    share = weight / sum(weights.values())
                    expected[other] += share
                    variance += share * (1 - share) / 4
    assert sum(not tree.is_chain and bool(path) for tree, path in kept) > 50
    assert max(abs(found[token] - expected[token]) for token in FOUR) < 3 * sqrt(variance)


def test_a_second_turn_continues_the_rows_of_the_last_tree(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some answers end with the pass over a tree. The next turn extends their text."""
    even = {"temp": 1.5, "logit_bias": ONLY_FOUR}
    with open_drafting(target, "eagle3", tmp_path) as runner:
        (drafter,) = runner.engine.resources.speculation.drafters
        counts = check_drafted_cells(drafter, monkeypatch)
        passes: list[BatchRows] = []

        def observe(rows: BatchRows) -> None:
            passes.append(rows)
            drafter.observe(rows)

        runner.context.on_computed = observe
        n_trees = 0
        for seed in range(12):
            prompt = (*PROMPTS[0], seed + 3)
            text = (*prompt, *ids(answer(runner, prompt, 20, seed=seed, **even)))
            n_trees += bool(passes[-1].branches)
            counts.clear()
            answer(runner, (*text, *PROMPTS[1]), seed=seed, **even)
            assert counts[0] >= len(text) + len(PROMPTS[1]) - 2
    assert n_trees > 2


def test_the_rows_of_the_text_are_found_in_a_tree() -> None:
    """Node 1 and node 3 have the same token at the same position."""
    tree = TokenTree.merge([(7, 9), (8, 9), (8, 6)])
    rows = BatchRows(
        [5, *tree.tokens],
        [2, *(3 + depth for depth in tree.depths())],
        [0] * 6,
        [True] * 6,
        [(0, 1, 2), *tree.branches()],
    )
    request = Request((1,), default_sampling())

    def find(text: list[int]) -> list[int]:
        return find_text_rows(rows, Sequence(1, request, None, 0, 0.0, tokens=text, slot=0))  # type: ignore[arg-type]

    assert find([1, 2, 5, 7, 9]) == [0, 1, 2]
    assert find([1, 2, 5, 8, 9, 4]) == [0, 3, 4]
    assert find([1, 2, 5, 8, 6]) == [0, 3, 5]
    assert find([1, 2, 5, 9, 9]) == [0]
    assert find([1, 2, 4, 7]) == []
