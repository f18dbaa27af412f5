"""Embeddings of causal and bidirectional models, compared with the hidden states of
transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from llmcli.runtime.scoring import embedder as subject
from llmcli.runtime.scoring.embedder import Embedder, normalize, split_into_passes
from tests.quant import tiny_gguf
from tests.runtime import bert

TEXTS = ["hello world", "the cat sat on a mat", "cats", *(f"hello {'cat ' * n}" for n in range(20))]
OPTIONS = RunOptions(
    ctx_size=512, threads=1, cache_type_k="f32", cache_type_v="f32", flash_attn="off"
)


@contextmanager
def open_embedding_runner(path: Path, options: RunOptions = OPTIONS) -> Iterator[Runner]:
    with open_runner(path, options, native_sampling=False, needs_text=False) as runner:
        yield runner


def embed(embedder: Embedder, texts: list[list[int]]) -> tuple[list[np.ndarray], int]:
    """Return the vectors of the texts, and the number of passes."""
    job, steps = embedder.start_job(texts), 0
    while job.step():
        steps += 1
    assert [vector.dtype for vector in job.vectors] == [np.float32] * len(texts)
    return job.vectors, steps


def pool(hidden: np.ndarray, pooling: str) -> np.ndarray:
    """Return the normalized vector of a text, pooled from the hidden states of its tokens."""
    return normalize({"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling])


def test_vectors_of_a_bert_equal_those_of_transformers(tmp_path):
    torch, model = pytest.importorskip("torch"), bert.oracle()
    states: list[np.ndarray] = []
    for number, name in ((1, "mean"), (2, "cls"), (3, "last"), (None, "mean"), (0, "mean")):
        with open_embedding_runner(bert.bert(tmp_path / f"{number}.gguf", number, model)) as runner:
            embedder = runner.embedder()
            assert not runner.can_generate and not embedder.is_causal and embedder.pooling == name
            ids = [embedder.encode(text) for text in TEXTS]
            assert ids[1] == [2, 7, 8, 9, 11, 12, 13, 3]  # [CLS] … [SEP], words and pieces of words
            vectors, steps = embed(embedder, ids)
        assert steps < len(ids)
        with torch.no_grad():
            states = states or [
                model(torch.tensor([tokens])).last_hidden_state[0].numpy() for tokens in ids
            ]
        for hidden, vector in zip(states, vectors, strict=True):
            np.testing.assert_allclose(vector, pool(hidden, name), atol=1e-4)


def test_vectors_of_a_t5_encoder_equal_those_of_transformers(tmp_path):
    torch, model = pytest.importorskip("torch"), bert.t5_oracle()
    with open_embedding_runner(bert.t5(tmp_path / "t5.gguf", model)) as runner:
        embedder = runner.embedder()
        assert not embedder.is_causal and embedder.pooling == "mean"
        ids = [embedder.encode(text) for text in ("hello world", "the cat", "abc hello the cat")]
        assert ids[0] == [3, 4, 1]
        vectors, _ = embed(embedder, ids)
    for tokens, vector in zip(ids, vectors, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(
                vector, pool(model(torch.tensor([tokens]))[0][0].numpy(), "mean"), atol=1e-4
            )


@pytest.fixture(scope="module")
def hidden(stories: Path) -> Callable[[list[int]], np.ndarray]:
    """Return a function that computes the last hidden states of stories260K with transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(stories, dtype=torch.float32).eval()

    @cache
    def states(tokens: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).last_hidden_state[0].numpy()

    return lambda tokens: states(tuple(tokens))


@pytest.mark.parametrize("rows", [512, 32])
def test_vectors_of_a_causal_model_equal_those_of_transformers(
    stories_gguf, hidden, monkeypatch, rows
):
    monkeypatch.setattr(subject, "PASS_TOKENS", rows)
    with open_embedding_runner(stories_gguf) as runner:
        embedder = runner.embedder()
        assert embedder.is_causal and embedder.pooling == "last"  # the file names none
        ids = [embedder.encode(text) for text in (*TEXTS, "Once upon a time there was a cat. " * 9)]
        assert max(map(len, ids)) > 64  # some take several passes of 32
        for pooling in ("last", "mean", "cls"):
            embedder.close()
            embedder.pooling = pooling
            vectors, steps = embed(embedder, ids)
            assert steps > 4 or rows == 512
            for tokens, vector in zip(ids, vectors, strict=True):
                np.testing.assert_allclose(vector, pool(hidden(tokens), pooling), atol=2e-4)


@pytest.mark.parametrize("make", [tiny_gguf.mamba, tiny_gguf.gemma3])
def test_vectors_do_not_depend_on_the_length_of_passes_with_recurrent_state_or_a_window(
    tmp_path, monkeypatch, make
):
    vectors = []
    for rows in (64, 16):
        monkeypatch.setattr(subject, "PASS_TOKENS", rows)
        with open_embedding_runner(make(tmp_path / "model.gguf")) as runner:
            vectors.append(
                embed(runner.embedder(), [list(range(3, 63)), [5], list(range(3, 63, 2))])[0]
            )
    for first, second in zip(*vectors, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-3)


def test_answers_and_embeddings_alternate_on_one_model(stories_gguf):
    greedy = default_sampling().with_values({"temp": 0})
    with open_runner(stories_gguf, OPTIONS) as runner:
        request = Request(runner.encode_text("Once upon a time"), greedy, max_tokens=8)
        engine, embedder = runner.engine, runner.embedder()
        assert runner.embedding_bytes == 0
        alone = [event.token.id for event in runner.reply(request) if event.token]
        number = engine.submit(request)
        job, tokens = embedder.start_job([embedder.encode(text) for text in TEXTS]), []
        more = True
        while engine.is_busy or more:
            tokens += [event.token.id for event in engine.step() if event.token]
            more = job.step()
        assert engine.pop_answer(number).finish == "length" and tokens == alone
        assert len(job.vectors) == len(TEXTS)
        assert runner.embedding_bytes is None or runner.embedding_bytes > 0
        engine.ledger.check()


def test_context_grows_with_the_text_up_to_its_limit(stories_gguf):
    with open_embedding_runner(stories_gguf, RunOptions(ctx_size=1024, threads=1)) as runner:
        embedder = runner.embedder()
        short, _ = embed(embedder, [[5, 6, 7]])
        assert embedder.ensure_context(3).n_ctx == 512
        embed(embedder, [[5] * 700])
        assert embedder.ensure_context(3).n_ctx == 1024
        again, _ = embed(embedder, [[5, 6, 7]])
        np.testing.assert_allclose(short[0], again[0], atol=1e-5)
        with pytest.raises(UserError, match="1025 tokens, and this model embeds up to 1024"):
            embedder.start_job([[5], [5] * 1025])


def test_text_longer_than_the_positions_of_a_bert_is_refused(tmp_path):
    with open_embedding_runner(bert.bert(tmp_path / "bert.gguf")) as runner:
        embedder = runner.embedder()
        embed(embedder, [[5] * bert.CONTEXT, [6] * bert.CONTEXT])
        with pytest.raises(
            UserError, match=f"65 tokens, and this model embeds up to {bert.CONTEXT}"
        ):
            embedder.start_job([[5] * (bert.CONTEXT + 1)])


def test_reranker_without_a_head_and_text_from_an_embedding_model_are_refused(tmp_path):
    path = bert.bert(tmp_path / "bert.gguf", pooling=4)
    with (
        open_embedding_runner(path) as runner,
        pytest.raises(UserError, match="ranks pairs of texts"),
    ):
        runner.embedder()
    with pytest.raises(UserError, match="made for embeddings"), open_runner(path, OPTIONS):
        pass
    with open_embedding_runner(path) as runner:  # a pass over it would abort the process
        runner.engine.submit(Request((2, 5, 3), default_sampling()))
        with pytest.raises(UserError, match="made for embeddings"):
            runner.engine.step()


def test_diffusion_model_is_refused(tmp_path):
    path = tiny_gguf.llama(tmp_path / "llada.gguf", arch="llada", layers=1)
    for answers in (True, False):
        with (
            pytest.raises(UserError, match="writes by diffusion"),
            open_runner(path, OPTIONS, needs_text=answers),
        ):
            pass
    options = ContextOptions(64, 64, 64)
    with open_model(path) as model, open_context(model, options) as context:
        with pytest.raises(UserError, match="writes by diffusion"):
            context.decode(BatchRows([5], [0], [0], [True]))


def test_normalized_vector_has_length_1_and_zeros_stay_zeros():
    np.testing.assert_allclose(normalize(np.array([3.0, 4.0])), [0.6, 0.8])
    assert normalize(np.zeros(3)).tolist() == [0, 0, 0]


def test_texts_are_divided_into_passes_in_order():
    assert list(split_into_passes([3, 0, 6], lambda: 4)) == [
        ((0, 0, 3), (2, 0, 1)),
        ((2, 1, 5),),
        ((2, 5, 6),),
    ]
    most = iter([2, 5, 9])
    assert list(split_into_passes([9], lambda: next(most))) == [
        ((0, 0, 2),),
        ((0, 2, 7),),
        ((0, 7, 9),),
    ]


def test_passes_are_short_while_answers_are_generated(stories_gguf):
    with open_embedding_runner(stories_gguf) as runner:
        embedder = runner.embedder()
        long_passes, n_long = embed(embedder, [[5, 6, 7] * 90])
        embedder.uses_short_passes = True
        short_passes, n_short = embed(embedder, [[5, 6, 7] * 90])
    # the first 269 tokens take 5 passes of 64 instead of one of 512; the last token takes one more
    assert n_long == 2 and n_short == 6
    np.testing.assert_allclose(long_passes[0], short_passes[0], atol=1e-5)
