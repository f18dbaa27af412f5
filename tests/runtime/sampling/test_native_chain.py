"""The numpy steps and llama.cpp's samplers agree, alone and as whole chains."""

import ctypes
from collections.abc import Iterable

import numpy as np
import pytest

from llmcli.runtime.binding import sampler as door
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling, step_types
from llmcli.runtime.sampling.base import NativeStep
from llmcli.runtime.sampling.chain import NumpyChain, make_chain
from llmcli.runtime.sampling.dry import Dry
from llmcli.runtime.sampling.logit_bias import LogitBias
from llmcli.runtime.sampling.mirostat import Mirostat, MirostatPicker
from llmcli.runtime.sampling.penalties import Penalties
from llmcli.runtime.sampling.temperature import Temperature
from llmcli.runtime.sampling.truncate import MinP, TopK, TopP, TypicalP, softmax
from llmcli.runtime.sampling.xtc import XTC
from tests.fixtures.fakes import FakeRow, FakeVocabulary

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
HISTORY = [3, 3, 7, 11, 5, 6, 7, 11, 2, 5, 6, 7, 11]
ACTIVE = [
    LogitBias(("5+2.5", "7-1", "7-1", "9-inf")),
    Penalties(1.3, 64, 0.2, 0.1),
    Dry(0.8, 1.75, 2, 64),
    TopK(5),
    TopK(1),
    TypicalP(0.6),
    TopP(0.7),
    TopP(0.0),
    MinP(0.1),
    XTC(1.0, 0.05),
    Temperature(0.5),
    Temperature(0.8, 0.5, 1.3),
]
CHAINS = [
    {},
    {"top_k": 0, "top_p": 0.8, "min_p": 0, "typical": 0.9, "temp": 1.3},
    {
        "repeat_penalty": 1.2,
        "dry_multiplier": 0.9,
        "xtc_probability": 1,
        "xtc_threshold": 0.08,
        "logit_bias": "7+1",
    },
    {
        "top_k": 100,
        "top_p": 1,
        "dynatemp_range": 0.4,
        "dynatemp_exponent": 0.7,
        "presence_penalty": 0.5,
    },
    {"mirostat": 2, "mirostat_tau": 3, "logit_bias": "7+1"},
]
# Values that chi-square exceeds once in a thousand, by degrees of freedom. Seeds are fixed: it
# never flickers.
RARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def random(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)


def ties(seed: int) -> np.ndarray:
    return np.round(random(seed))


def dropped(seed: int) -> np.ndarray:
    row = random(seed)
    row[seed % 3 :: 3] = -np.inf
    return row


def alone(seed: int) -> np.ndarray:
    row = np.full(300, -np.inf, np.float32)
    row[7 * seed] = 1.5
    return row


def large(seed: int) -> np.ndarray:
    """As a language's words are: few likely ones, a long tail."""
    generator = np.random.default_rng(seed)
    rank = generator.permutation(49_152)
    return (-1.5 * np.log1p(rank) + generator.normal(0, 0.1, len(rank))).astype(np.float32)


def uneven(seed: int) -> np.ndarray:
    """As large, its likeliest among the last few, which fill no line of the table that they are
    looked for in.
    """
    return np.sort(large(seed))[: 3 * 4096 + 77]


def candidates(row: np.ndarray):
    """A llama_token_data_array over the row, and what must live as long."""
    table = np.zeros(len(row), CANDIDATE)
    table["id"], table["logit"] = np.arange(len(row)), row
    data = (lib().llama_token_data * len(row)).from_buffer(table)
    return lib().llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False), data


def left(array) -> np.ndarray:
    """The candidates that an array still holds."""
    size = array.size * CANDIDATE.itemsize
    return np.frombuffer(ctypes.string_at(array.data, size), CANDIDATE)


def native(
    parts: Iterable[NativeStep], row: np.ndarray, tokens: list[int], chains: NativeChains
) -> np.ndarray:
    """What llama.cpp's own samplers leave of a row, in the form of the numpy steps."""
    array, _alive = candidates(row)
    for part in parts:
        sampler = chains.make_sampler(part, 1)
        for token in tokens:
            lib().llama_sampler_accept(sampler, token)
        lib().llama_sampler_apply(sampler, ctypes.byref(array))
        lib().llama_sampler_free(sampler)
    out = np.full_like(row, -np.inf)
    rest = left(array)
    out[rest["id"]] = rest["logit"]
    return out


def agree(ours: np.ndarray, theirs: np.ndarray, rows) -> None:
    """The same tokens with the same logits; of equal logits it may be others that stay."""
    kept, others = np.isfinite(ours), np.isfinite(theirs)
    both = kept & others
    assert both.any() or rows is ties
    np.testing.assert_allclose(ours[both], theirs[both], rtol=1e-4, atol=1e-4)
    if rows is ties:
        np.testing.assert_allclose(
            np.sort(ours[kept]), np.sort(theirs[others]), rtol=1e-4, atol=1e-4
        )
    else:  # sums over a whole vocabulary are rounded otherwise: one token at the edge may differ
        assert (kept != others).sum() <= (1 if rows is large else 0)


@pytest.mark.parametrize("rows", [random, ties, dropped, alone, large])
@pytest.mark.parametrize("step", ACTIVE, ids=repr)
def test_a_step_leaves_what_llama_cpp_leaves(step, rows):
    for seed in range(3 if rows is large else 20):
        row = rows(seed)
        parts = step.native()
        assert parts
        agree(step(row, HISTORY), native(parts, row, HISTORY, NativeChains(len(row))), rows)


def test_every_step_is_held_against_llama_cpp():
    assert {type(step) for step in ACTIVE} | {Mirostat} == set(step_types())


@pytest.mark.parametrize("rows", [random, ties, dropped, alone, large])
@pytest.mark.parametrize("settings", CHAINS, ids=str)
def test_a_whole_chain_leaves_what_llama_cpp_leaves(settings, rows):
    sampling = default_sampling().with_values(settings)
    for seed in range(2 if rows is large else 10):
        row = rows(seed)
        chain = make_chain(sampling, 1, None, words(len(row)))
        assert isinstance(chain, NumpyChain)
        ours = row
        for step, _ in chain.steps:
            ours = step(ours, HISTORY)
        chains = NativeChains(len(row))
        recorder = Recorder()
        make_chain(sampling, 1, recorder, words(len(row)))
        theirs = native(
            [part for part in recorder.steps if not part[0].startswith("mirostat")],
            row,
            HISTORY,
            chains,
        )
        agree(ours, theirs, rows)


class Recorder:
    """Takes note of the samplers that a native chain would be made of."""

    def chain(self, steps: list[NativeStep], seed: int) -> None:
        self.steps = steps


def words(size: int) -> FakeVocabulary:
    return FakeVocabulary(lambda token: b"word", lambda token: False, size)


@pytest.mark.parametrize("seed", range(30))
def test_dry_finds_the_repetitions_that_llama_cpp_finds(seed):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(
        0, 2 + seed % 5, 150
    ).tolist()  # few words: many repetitions within repetitions
    step = Dry(0.5 + seed / 10, 1.0 + seed % 3 / 2, seed % 4, int(generator.integers(1, 200)))
    for end in range(0, 150, 7):
        agree(
            step(random(1), tokens[:end]),
            native(step.native(), random(1), tokens[:end], NativeChains(300)),
            random,
        )


def test_dry_stops_at_the_tokens_where_llama_cpp_stops(stories_gguf):
    with open_model(stories_gguf, vocab_only=True) as model:
        vocabulary = model
        apply = Dry(0.8, 1.75, 1, 100).bind(vocabulary)
        breakers = apply.keywords["breakers"]
        assert {model.piece(token) for token in breakers} >= {b"\n", b'"'}
        chains = NativeChains(model.n_vocab, model.vocab)
        row = np.zeros(model.n_vocab, np.float32)
        stopped = 0
        for seed in range(40):
            generator = np.random.default_rng(seed)
            tokens = generator.choice([300, 301, 302, *sorted(breakers)[:2]], 60).tolist()
            ours = apply(row, tokens)
            agree(ours, native(Dry(0.8, 1.75, 1, 100).native(), row, tokens, chains), random)
            stopped += not np.array_equal(ours, Dry(0.8, 1.75, 1, 100)(row, tokens))
        assert stopped > 10


def drawn(chain, row: np.ndarray) -> int:
    """One draw of a native chain from a row, without a context."""
    array, _alive = candidates(row)
    lib().llama_sampler_apply(chain.pointer, ctypes.byref(array))
    return int(array.data[array.selected].id)


@pytest.mark.parametrize("rows", [random, dropped, large, uneven])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5, "temp": 1.4},
        {"top_k": 150, "top_p": 1, "min_p": 0, "temp": 2},
        {"typical": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"dynatemp_range": 0.4},
    ],
    ids=str,
)
def test_the_likeliest_candidates_draw_what_all_of_them_draw(settings, rows, monkeypatch):
    monkeypatch.setattr(door, "min_shortlist_vocabulary", lambda: 0)
    sampling, size = default_sampling().with_values(settings), len(rows(0))
    few, whole = (make_chain(sampling, 9, NativeChains(size), words(size)) for _ in range(2))
    for seed in range(10 if rows in (large, uneven) else 40):
        row = rows(seed)
        assert few.draw(FakeRow(row), HISTORY) == drawn(whole, row), seed
    few.close()
    whole.close()


def test_a_row_that_forbids_nearly_all_is_left_to_llama_cpp(monkeypatch):
    monkeypatch.setattr(door, "min_shortlist_vocabulary", lambda: 0)
    chain = make_chain(default_sampling(), 9, NativeChains(300), words(300))
    assert [chain.shortlist(row) for row in (alone(1), np.full(300, np.nan, np.float32))] == [
        None,
        None,
    ]
    assert len(chain.shortlist(random(1)).values) >= 40
    chain.close()


def test_a_chain_of_few_answers_as_one_of_all(stories_gguf, monkeypatch):
    """Through the real context, whatever the size of the vocabulary."""
    found = []
    for many in (0, 1000):
        monkeypatch.setattr(door, "min_shortlist_vocabulary", lambda many=many: many)
        with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1)) as runner:
            request = Request(
                runner.encode_text("Once"),
                default_sampling().with_values({"seed": 4, "temp": 1.2}),
                60,
            )
            found.append("".join(event.text for event in runner.reply(request)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "xtc_probability": 0.4,
            "xtc_threshold": 0.15,
            "temp": 1,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
        },
        {"mirostat": 2, "mirostat_tau": 1.2, "temp": 1},
        {"mirostat": 1, "mirostat_tau": 1.2, "temp": 1},
        {"dynatemp_range": 0.5, "temp": 1, "top_k": 0, "top_p": 1, "min_p": 0},
    ],
    ids=str,
)
def test_draws_of_both_kinds_follow_the_probabilities(settings):
    row = np.log(np.array([0.4, 0.25, 0.2, 0.1, 0.05], np.float32))
    sampling = default_sampling().with_values(settings)
    expected = expectation(sampling, row)
    draws = 3000
    for kind in (None, NativeChains(len(row))):
        counts = np.zeros(len(row))
        for seed in range(draws):
            chain = make_chain(sampling, seed, kind, words(len(row)))
            token = (
                chain.draw(FakeRow(row), []) if isinstance(chain, NumpyChain) else drawn(chain, row)
            )
            counts[token] += 1
            chain.close()
        possible = expected > 0
        assert not counts[~possible].any()
        gaps = (counts - draws * expected)[possible]
        assert (gaps**2 / (draws * expected[possible])).sum() < RARE[int(possible.sum()) - 1]


def expectation(sampling, row: np.ndarray) -> np.ndarray:
    """The probability of every token at the first draw, from the deterministic parts."""

    def share(logits: np.ndarray) -> np.ndarray:
        alive = np.isfinite(logits)
        out = np.zeros(len(row))
        out[alive] = softmax(logits[alive])
        return out

    if sampling["mirostat"]:
        return share(next(step for step in sampling.steps if step.name == "mirostat")(row, []))
    without, taken = row, row
    for step in sampling.steps:
        if step.name == "xtc":
            taken = step(taken, [])
        else:
            without, taken = step(without, []), step(taken, [])
    chance = sampling["xtc_probability"]
    return (1 - chance) * share(without) + chance * share(taken)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_remembers_as_llama_cpp_does(version):
    step = Mirostat(version, 4.0, 0.2)
    state = MirostatPicker(step)
    library = lib()
    sampler = (
        library.llama_sampler_init_mirostat_v2(5, 4.0, 0.2)
        if version == 2
        else library.llama_sampler_init_mirostat(49_152, 5, 4.0, 0.2, 100)
    )
    sizes = set()
    for seed in range(25):
        row = large(seed) * np.float32(1 + seed % 3 / 4)
        array, _alive = candidates(row)
        library.llama_sampler_apply(sampler, ctypes.byref(array))
        kept = step.truncate(row, state.mu)
        theirs = np.full_like(row, -np.inf)
        theirs[left(array)["id"]] = row[left(array)["id"]]
        agree(kept, theirs, large)
        sizes.add(array.size)
        state.record_draw(kept, int(array.data[array.selected].id))
    library.llama_sampler_free(sampler)
    assert len(sizes) > 10  # it did move
