"""Draws that row_draws.c makes together are those of llama.cpp's samplers over the whole vocabulary,
one row at a time.
"""

import ctypes
import shutil
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding import sampler
from llmcli.runtime.binding.kernels import row_draws, row_scan
from llmcli.runtime.binding.kernels.log_sum_exp import LogSumExp
from llmcli.runtime.binding.kernels.row_draws import ReadTokens
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.sampler import GreedyNative, NativeChain, NativeChains
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import EndConditions, Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import Sampling, default_sampling
from llmcli.runtime.sampling.chain import GreedyChain, PlannedDraw, make_chain
from llmcli.runtime.strategies.plain import PlainStrategy
from tests.fixtures.fakes import FakeContext, FakeRow, FakeVocabulary

FOLDER = Path(row_draws.__file__).parent
BUILDS = {"this CPU": ["-march=native"], "any CPU": [], "generic": ["-U__SSE2__"]}
SIZE = 5_003
SETTINGS = [
    {},
    {"temp": 0},
    {"temp": 0, "repeat_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.2},
    {"temp": 0, "logit_bias": "5+9 17-inf 5-3", "repeat_last_n": 3, "repeat_penalty": 1.9},
    {"top_k": 3, "temp": 1.7},
    {"top_k": 200, "top_p": 1, "min_p": 0, "temp": 2},
    {"repeat_penalty": 1.3, "repeat_last_n": 5},
    {"repeat_penalty": 0.6, "frequency_penalty": -0.7, "repeat_last_n": -1, "temp": 1.5},
    {"dry_multiplier": 2, "dry_base": 2, "dry_allowed_length": 1, "temp": 1.5},
    {"dry_multiplier": 1, "presence_penalty": 0.9, "logit_bias": "3+4 3+1 8-2 9-inf", "temp": 2},
    {"logit_bias": "3+14 8-2"},
    {"typical": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.4, "top_n_sigma": 2},
    {"top_k": 0, "top_p": 0.8, "typical": 0.95, "temp": 1.3},
    {"top_k": 1000, "repeat_penalty": 1.2},
    {"mirostat": 2, "mirostat_tau": 3},
]


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """The functions of row.c and row_draws.c, compiled for each kind of CPU."""
    compiler = shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no GCC here")
    made = {}
    for name, flags in BUILDS.items():
        out = tmp_path_factory.mktemp("draws") / "draws.so"
        sources = [str(FOLDER / source) for source in ("row.c", "row_draws.c")]
        options = ["-O2", "-pthread", "-shared", "-fPIC", *flags]
        subprocess.run([compiler, *options, *sources, "-o", str(out)], check=True)
        library = ctypes.CDLL(str(out))
        made[name] = row_scan.declare_functions(library), row_draws.declare_function(library)
    return made


@pytest.fixture(params=[*BUILDS, "own threads", "one thread"])
def kernel(request, builds, monkeypatch):
    """Use one build, with ggml's threads, with threads of its own, or with one thread."""
    scan, draws = builds[request.param if request.param in BUILDS else "any CPU"]
    if request.param == "own threads":
        draws = draws._replace(openmp=0)
    large = 1 << 40
    monkeypatch.setattr(
        row_draws, "MIN_PARALLEL_LOGITS", large if request.param == "one thread" else 0
    )
    monkeypatch.setattr(row_scan, "load_row_scan", lambda: scan)
    monkeypatch.setattr(row_draws, "load_row_draws", lambda: draws)
    monkeypatch.setattr(sampler, "min_shortlist_vocabulary", lambda: 0)


class Row(FakeRow):
    """A row whose context computes the log-sum as the real one."""

    @property
    def context(self):
        self_context = type("Context", (), {})()
        self_context.log_sum_exp = LogSumExp()
        return self_context

    def log_sum(self, near: float) -> float:
        return LogSumExp()(self.logits, self.address, near)


class AllTokens:
    """Gives all tokens to llama.cpp's samplers, as llama_sampler_sample does."""

    def __init__(self, chain: NativeChain) -> None:
        self.chain, self.n_seen = chain, 0

    def draw(self, logits: np.ndarray, tokens: list[int]) -> int:
        for token in tokens[self.n_seen :]:
            lib().llama_sampler_accept(self.chain.pointer, token)
        table = np.zeros(len(logits), sampler.CANDIDATE_DTYPE)
        table["id"], table["logit"] = np.arange(len(logits)), logits
        array = sampler.candidate_array(table)
        lib().llama_sampler_apply(self.chain.pointer, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        lib().llama_sampler_accept(self.chain.pointer, token)
        self.n_seen = len(tokens) + 1
        return token


def make_logits(generator: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """Return logits as of a language model: few likely tokens and a long tail, none equal."""
    order = generator.permutation(size)
    return (9 - 1.5 * np.log1p(order) + generator.normal(0, 0.3, size)).astype(np.float32)


def vocabulary(size: int = SIZE) -> FakeVocabulary:
    return FakeVocabulary(lambda token: b"word", lambda token: token in (2, 7), size)


def sampling(settings: dict) -> Sampling:
    return default_sampling().with_values(settings)


def test_draws_together_are_those_of_llama_cpp_over_all_tokens(kernel):
    """Over texts with repetitions, which penalties and DRY change, with every kind of chain."""
    generator = np.random.default_rng(1)
    native = NativeChains(SIZE, threads=3)
    chains = [make_chain(sampling(one), 5, native, vocabulary()) for one in SETTINGS]
    assert all(native.can_plan(chain) for chain in chains)
    references = []
    for settings in SETTINGS:
        if settings.get("temp") == 0:
            references.append(make_chain(sampling(settings), 5, None, vocabulary()))
        else:
            chain = make_chain(sampling(settings), 5, NativeChains(SIZE), vocabulary())
            references.append(AllTokens(chain))
    texts = [generator.integers(0, 12, 30).tolist() for _ in SETTINGS]
    changed = set()
    for _ in range(25):
        rows = [Row(make_logits(generator)) for _ in SETTINGS]
        for row in rows:
            row.logits[:12] += 7  # so that penalties matter
        before = [row.logits.copy() for row in rows]
        expected = [
            reference.draw(row if isinstance(reference, GreedyChain) else row.logits, text)
            for reference, row, text in zip(references, rows, texts, strict=True)
        ]
        draws = [
            PlannedDraw(chain, number, text, near=9.0)
            for number, (chain, text) in enumerate(zip(chains, texts, strict=True))
        ]
        native.prepare_draws(draws).draw(rows)
        for number, draw in enumerate(draws):
            assert draw.token == expected[number], SETTINGS[number]
            assert draw.log_sum == rows[number].log_sum(9.0)
            assert draw.seconds > 0
            if draw.token != before[number].argmax():
                changed.add(number)
            texts[number].append(draw.token)
        for row, logits in zip(rows, before, strict=True):
            np.testing.assert_array_equal(row.logits, logits)
    assert len(changed) >= len(SETTINGS) - 2
    for chain in chains:
        chain.close()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_draw_alone_equals_the_draw_with_others(settings, kernel):
    """Also with equal logits, impossible tokens, and rows where all tokens are impossible but few."""
    generator = np.random.default_rng(2)
    native = NativeChains(SIZE, threads=2)
    pairs = [
        [make_chain(sampling(settings), seed, native, vocabulary()) for seed in range(4)]
        for _ in range(2)
    ]
    for chain in [*pairs[0], *pairs[1]]:
        if isinstance(chain, NativeChain):
            chain._draw_from_all = AllRows(chain)
    texts = [[1, 2, 3, 2, 3] for _ in range(4)]
    for _ in range(6):
        rows = [Row(make_logits(generator)) for _ in range(4)]
        rows[1].logits[:] = np.round(rows[1].logits)
        rows[2].logits[generator.random(SIZE) < 0.99] = -np.inf
        rows[3].logits[3:] = -np.inf
        alone = [
            chain.draw(row, text) for chain, row, text in zip(pairs[0], rows, texts, strict=True)
        ]
        draws = [
            PlannedDraw(chain, number, text)
            for number, (chain, text) in enumerate(zip(pairs[1], texts, strict=True))
        ]
        native.prepare_draws(draws).draw(rows)
        for draw, token in zip(draws, alone, strict=True):
            found = draw.chain.draw(draw.row, draw.tokens) if draw.token is None else draw.token
            assert found == token
            assert draw.row.logits[token] > -np.inf
            draw.tokens.append(token)


class AllRows:
    """Replaces llama_sampler_sample, which needs a real context."""

    def __init__(self, chain: NativeChain) -> None:
        self.chain = chain

    def __call__(self, row: Row) -> int:
        token = self.chain._candidates.sample(self.chain._address, row.logits)
        lib().llama_sampler_accept(self.chain.pointer, token)
        return token


def test_banned_tokens_are_not_drawn_and_rows_stay_as_they_are(kernel):
    generator = np.random.default_rng(3)
    native = NativeChains(SIZE, threads=2)
    every = [{}, {"temp": 0}, {"repeat_penalty": 1.2, "temp": 3}, {"top_k": 0, "temp": 3}]
    chains = [make_chain(sampling(one), 1, native, vocabulary()) for one in every]
    others = [make_chain(sampling(one), 1, native, vocabulary()) for one in every]
    for _ in range(10):
        rows = [Row(make_logits(generator)) for _ in every]
        copies = [Row(row.logits.copy()) for row in rows]
        bans = [np.argsort(row.logits)[-30:].astype(np.int32) for row in rows]
        draws = [
            PlannedDraw(chain, number, [4, 5], ban, near=8.0)
            for number, (chain, ban) in enumerate(zip(chains, bans, strict=True))
        ]
        native.prepare_draws(draws).draw(rows)
        for draw, row, copy, ban, other in zip(draws, rows, copies, bans, others, strict=True):
            np.testing.assert_array_equal(row.logits, copy.logits)
            assert draw.log_sum == copy.log_sum(8.0)
            assert draw.token not in ban
            copy.logits[ban] = -np.inf
            if not isinstance(other, NativeChain) or other._top_k:
                assert other.draw(copy, [4, 5]) == draw.token


def test_the_number_of_the_interface_is_that_of_the_header(builds):
    header = (FOLDER / "row.h").read_text()
    assert f"#define ROW_INTERFACE {row_scan.INTERFACE} " in header
    assert None not in builds["this CPU"]


def test_a_library_with_another_structure_is_not_used(monkeypatch):
    library = types.SimpleNamespace(
        llmcli_row_interface=lambda: row_scan.INTERFACE,
        llmcli_row_draw_size=lambda: ctypes.sizeof(row_draws.RowDraw) + 8,
        llmcli_draw_rows=lambda: None,
    )
    assert row_draws.declare_function(library) is None
    del library.llmcli_row_interface
    assert row_scan.declare_functions(library) is None


@pytest.mark.parametrize("build", BUILDS)
def test_maxima_ignore_nan_and_follow_changes(builds, build):
    """NaN made the largest logits before it invisible."""
    scan, _ = builds[build]
    generator, count = np.random.default_rng(9), 3_003
    row, largest = make_logits(generator, count), np.empty(scan.count_maxima(count), np.float32)
    fresh = np.empty_like(largest)
    row[generator.random(count) < 0.05] = np.nan
    row[generator.random(count) < 0.05] = -np.inf

    def find(maxima, known):
        return scan.find_likeliest(row.ctypes.data, count, maxima.ctypes.data, known)

    assert find(largest, 0) == np.nanargmax(row)
    for step in range(500):
        at, before = int(generator.integers(count)), np.float32(0)
        if step % 3 == 0:
            at = int(np.nanargmax(row))
        before = row[at]
        row[at] = generator.choice([-np.inf, np.nan, before - 3, before + 3, 1])
        scan.note_change(row.ctypes.data, count, largest.ctypes.data, at, before)
        assert find(largest, 1) == find(fresh, 0) == np.nanargmax(row)
        np.testing.assert_array_equal(largest, fresh)


def test_tokens_outside_the_vocabulary_change_nothing(kernel):
    native = NativeChains(SIZE, threads=2)
    settings = {"temp": 0, "logit_bias": f"{SIZE + 5}+100", "repeat_penalty": 1.5}
    chain = make_chain(sampling(settings), 1, native, vocabulary())
    assert isinstance(chain, GreedyNative)
    row = Row(make_logits(np.random.default_rng(1)))
    assert chain.draw(row, [SIZE + 100, -1]) == row.logits.argmax()


def test_penalties_after_top_k_read_the_text(kernel):
    """In the order of llama-server's field `samplers`; they were never given any token."""
    order = ["top_k", "penalties", "temperature"]
    wanted = sampling({"presence_penalty": 50, "top_k": 2, "temp": 0.5}).in_order(order)
    chain = make_chain(wanted, 1, NativeChains(SIZE), vocabulary())
    row = Row(make_logits(np.random.default_rng(4)))
    best, second = np.argsort(-row.logits)[:2].tolist()
    row.logits[best] += 30
    assert chain.draw(row, [1, 2]) == best
    assert chain.draw(row, [1, 2, best]) == second


def test_greedy_penalties_round_like_llama_cpp():
    """Both chains of temperature 0, and llama.cpp, give the same bits."""
    generator = np.random.default_rng(5)
    row, text = make_logits(generator), generator.integers(0, SIZE, 64).tolist()
    wanted = sampling(
        {"repeat_penalty": 1.17, "frequency_penalty": 0.123, "presence_penalty": 0.456}
    )
    step = next(step for step in wanted.steps if step.name == "penalties")
    chains = NativeChains(SIZE)
    native = chains.make_sampler(step.native()[0], 0)
    for token in text:
        lib().llama_sampler_accept(native, token)
    table = np.zeros(SIZE, sampler.CANDIDATE_DTYPE)
    table["id"], table["logit"] = np.arange(SIZE), row
    lib().llama_sampler_apply(native, ctypes.byref(sampler.candidate_array(table)))
    lib().llama_sampler_free(native)
    np.testing.assert_array_equal(step(row, text), table["logit"])


@pytest.mark.parametrize("window", [1, 7, row_draws.LONG_WINDOW, row_draws.LONG_WINDOW + 1])
def test_read_tokens_contain_the_window_and_stay_few(window):
    generator, read, text = np.random.default_rng(6), ReadTokens(window), []
    for token in generator.integers(0, 300, 5_000).tolist():
        read.add(token)
        text.append(token)
        assert set(text[-window:]) <= set(read.tokens)
    assert len(read.tokens) <= max(2 * window, 300)


MIXED = [
    Request(tuple(b"one"), sampling({"seed": 1, "temp": 3}), 20),
    Request(tuple(b"second"), sampling({"seed": 2, "temp": 0}), 20, ignore_eos=True),
    Request(tuple(b"third"), sampling({"seed": 3, "repeat_penalty": 1.4}), 20, logprobs=True),
    Request(tuple(b"4"), sampling({"seed": 4, "temp": 0, "frequency_penalty": 2}), 20),
    Request(tuple(b"fifth"), sampling({"seed": 5, "mirostat": 1}), 20, logprobs=True),
    Request(
        tuple(b"6"),
        sampling({"seed": 6, "temp": 2, "dry_multiplier": 1}),
        20,
        logprobs=True,
        top_logprobs=3,
        end_conditions=EndConditions(min_tokens=9),
    ),
]


def answer_all(threads: int | None, monkeypatch, abort_at: int = -1) -> list[list]:
    """Return the tokens, texts and log-probabilities of all answers. `threads`: None draws row by
    row. `abort_at`: the number of a pass that is aborted.
    """
    generator = np.random.default_rng(7)
    noise = [make_logits(generator) for _ in range(64)]
    context = FakeContext(n_ctx=1024, n_seq_max=8, abort_at=abort_at)
    monkeypatch.setattr(
        context, "_logits", lambda tokens: noise[(sum(tokens) + len(tokens)) % 64].copy()
    )
    monkeypatch.setattr(FakeRow, "context", Row.context, raising=False)
    monkeypatch.setattr(FakeRow, "log_sum", Row.log_sum)
    native = NativeChains(SIZE, threads=threads or 1)
    together: list[int] = []
    prepare_draws = native.prepare_draws
    if threads is None:
        monkeypatch.setattr(native, "can_plan", lambda chain: False)
    monkeypatch.setattr(
        native, "prepare_draws", lambda draws: together.append(len(draws)) or prepare_draws(draws)
    )
    engine = Engine(context, vocabulary(), native, schedule=Schedule())
    ids = [engine.submit(request) for request in MIXED]
    while engine.is_busy:
        engine.step()
        engine.check()
    assert (max(together, default=0) >= 4) == (threads is not None)
    answers = [engine.pop_answer(number) for number in ids]
    assert not any(answer.error for answer in answers)
    return [
        [(token.id, token.text, token.logprob) for token in answer.tokens]
        + [answer.finish, answer.top_logprobs]
        for answer in answers
    ]


def test_answers_are_the_same_with_draws_made_together(kernel, monkeypatch):
    serial = answer_all(None, monkeypatch)
    assert answer_all(3, monkeypatch) == serial
    assert max(map(len, serial)) > 15


def test_draws_prepared_for_an_aborted_pass_are_prepared_again(kernel, monkeypatch):
    """Their samplers have not drawn, so that the answers stay the same."""
    assert answer_all(3, monkeypatch, abort_at=6) == answer_all(None, monkeypatch)


def test_a_plan_that_no_other_joins_is_not_made_twice(monkeypatch):
    """The banned tokens of a draw were collected for the plan, and again for the draw."""
    calls: list[tuple[int, int]] = []
    find_banned = PlainStrategy._banned

    def count(strategy, sequence, n_tokens):
        calls.append((sequence.id, n_tokens))
        return find_banned(strategy, sequence, n_tokens)

    monkeypatch.setattr(PlainStrategy, "_banned", count)
    noise = make_logits(np.random.default_rng(8))
    context = FakeContext(n_ctx=1024, n_seq_max=8)
    monkeypatch.setattr(context, "_logits", lambda tokens: noise.copy())
    engine = Engine(context, vocabulary(), NativeChains(SIZE), schedule=Schedule())
    limits = EndConditions(min_tokens=9, stop_tokens=frozenset([5]))
    engine.submit(Request(tuple(b"1"), sampling({"mirostat": 1}), 20))  # numpy alone draws
    engine.submit(Request(tuple(b"2"), sampling({}), 20, end_conditions=limits))
    while engine.is_busy:
        engine.step()
    assert len(calls) == len(set(calls)) > 25


def test_a_model_gives_the_same_answers_with_draws_made_together(stories_gguf, kernel, monkeypatch):
    """Its vocabulary is so small that some draws fall back to the chain itself."""
    wanted = [{"temp": 1.2}, {"temp": 0}, {"repeat_penalty": 1.3}, {"temp": 0, "logit_bias": "9+1"}]
    wanted += [{"top_k": 4, "dry_multiplier": 1}, {"top_k": 0, "mirostat": 2}]
    options, slots = RunOptions(ctx_size=512, threads=1), len(wanted)
    with open_runner(stories_gguf, options, slots=slots) as runner:
        prompt = runner.encode_text("Once upon a time")
        requests = [Request(prompt, sampling({"seed": 4, **one}), 24) for one in wanted]
        texts = []
        for can_plan in (True, False):
            if not can_plan:
                monkeypatch.setattr(runner.engine.resources.native, "can_plan", lambda chain: False)
            ids = [runner.engine.submit(request) for request in requests]
            while runner.engine.is_busy:
                runner.engine.step()
            texts.append([runner.engine.pop_answer(number).text for number in ids])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2


def test_without_our_c_code_each_chain_draws_by_itself(monkeypatch):
    monkeypatch.setattr(row_draws, "load_row_draws", lambda: None)
    native = NativeChains(SIZE)
    penalized = make_chain(sampling({"temp": 0, "repeat_penalty": 1.2}), 1, native, vocabulary())
    assert type(penalized) is GreedyChain
    assert not native.can_plan(make_chain(sampling({}), 1, native, vocabulary()))
