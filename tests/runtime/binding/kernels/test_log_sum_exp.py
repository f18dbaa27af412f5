"""All implementations of the log-sum-exp give the same sums, and row.c finds the same tokens as
numpy.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding import sampler
from llmcli.runtime.binding.kernels import log_sum_exp, row_scan
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling

SOURCE = Path(log_sum_exp.__file__).with_name("row.c")


BUILDS = {"this CPU": ["-march=native"], "any CPU": [], "generic": ["-U__SSE2__"]}


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """The functions of row.c, compiled by itself for each kind of CPU."""
    compiler = shutil.which("gcc")
    if not compiler:
        pytest.skip("row.c is for GCC, which is not here")
    builds_by_name = {}
    for name, flags in BUILDS.items():
        out = tmp_path_factory.mktemp("row") / "row.so"
        command = [
            compiler,
            "-O3",
            "-ffp-contract=fast",
            *flags,
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            str(out),
        ]
        subprocess.run(command, check=True)
        builds_by_name[name] = row_scan.declare_functions(ctypes.CDLL(str(out)))
    return builds_by_name


@pytest.fixture(params=BUILDS)
def c_functions(request, builds):
    """The functions of one build of row.c."""
    return builds[request.param]


@pytest.fixture(params=[*BUILDS, "ggml", "numpy"])
def implementation(request, monkeypatch):
    """Make LogSumExp use one of the implementations that a build of llama.cpp may leave
    available.
    """
    c_functions = (
        request.getfixturevalue("builds")[request.param] if request.param in BUILDS else None
    )
    monkeypatch.setattr(row_scan, "load_row_scan", lambda: c_functions)
    if request.param == "numpy":
        monkeypatch.setattr(log_sum_exp, "_native", lambda: None)


@pytest.mark.parametrize("size", [1, 7, 8, 33, 4095, 4097, 49_152, 262_144, 262_187])
def test_every_implementation_equals_the_sum_in_double_and_finds_the_likeliest_token(
    size, implementation
):
    logits = np.random.default_rng(size).normal(-5, 6, size).astype(np.float32)
    expected = np.logaddexp.reduce(logits.astype(np.float64))
    before = logits.copy()
    largest_logit = logits.max()
    for near, tolerance in (
        (largest_logit, 0),
        (largest_logit - 4, 0),
        (logits[0], 1e-5),
        (largest_logit - 79, 1e-5),
        (largest_logit - 500, 0),
        (largest_logit + 500, 0),
        (-np.inf, 0),
    ):
        log_sum, maxima = log_sum_exp.LogSumExp(), row_scan.RowMaxima()
        total = log_sum.with_maxima(logits, logits.ctypes.data, float(near), maxima)
        assert total == log_sum(logits, logits.ctypes.data, float(near))
        assert total == pytest.approx(expected, rel=1e-6, abs=tolerance or 1e-6)
        if c_functions := row_scan.load_row_scan():
            address, is_filled = maxima.consume(size)
            assert is_filled == bool(np.isfinite(near))
            assert not maxima.consume(size)[1]
            row = logits.ctypes.data, size, address, is_filled
            assert c_functions.find_likeliest(*row) == logits.argmax()
    assert np.array_equal(before, logits)


def test_a_logit_of_minus_infinity_adds_nothing_to_the_sum(implementation):
    logits = np.array([0, -np.inf, 0, -np.inf], np.float32)
    assert log_sum_exp.LogSumExp()(logits, logits.ctypes.data, 0.0) == pytest.approx(np.log(2))


def test_a_row_with_nan_or_infinity_gives_nan(implementation):
    for odd in (np.nan, np.inf, np.uint32(0x7FC00001).view(np.float32)):
        for index in (0, 4096, 5000):
            logits = np.linspace(-3, 3, 5001, dtype=np.float32)
            logits[index] = odd
            maxima = row_scan.RowMaxima()
            assert np.isnan(
                log_sum_exp.LogSumExp().with_maxima(logits, logits.ctypes.data, 3.0, maxima)
            )
            assert row_scan.load_row_scan() is None or np.isinf(odd) or not maxima.consume(5001)[1]


def test_the_exponential_of_row_c_is_within_two_units_in_the_last_place(c_functions):
    values = np.concatenate([np.linspace(-87, 88, 4001), np.linspace(-0.4, 0.4, 1001)]).astype(
        np.float32
    )
    found = [
        c_functions.sum_exp(values[at:].ctypes.data, 1, 0.0, None) for at in range(len(values))
    ]
    exact = np.exp(values.astype(np.float64))
    assert np.all(np.abs(found - exact) <= 2 * np.spacing(exact.astype(np.float32)))
    far = np.array([-np.inf, -1e30, -87.5, 88.8, 500], np.float32)
    found = [c_functions.sum_exp(far[at:].ctypes.data, 1, 0.0, None) for at in range(len(far))]
    assert found == pytest.approx([0, 0, 0, np.inf, np.inf], abs=1e-37)
    beyond = np.array([1e30, np.inf, np.nan], np.float32)
    assert not np.isfinite(
        [c_functions.sum_exp(beyond[at:].ctypes.data, 1, 0.0, None) for at in range(len(beyond))]
    ).any()


@pytest.mark.parametrize("size", [16, 300, 4096, 4100, 30_001, 262_144])
def test_find_few_finds_exactly_the_tokens_above_its_threshold(c_functions, size):
    table = np.zeros(4096, sampler.CANDIDATE_DTYPE)
    for seed, few in ((1, 40), (2, 1), (3, 256)):
        logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
        logits[::7] = -np.inf
        largest = np.empty(c_functions.count_maxima(size), np.float32)
        for known in (0, 1):
            row = logits.ctypes.data, size, largest.ctypes.data, known
            assert c_functions.find_likeliest(*row) == logits.argmax()
            count = c_functions.find_few(*row, few, table.ctypes.data, len(table))
            if size < 4096 and not count:
                continue  # fewer strands than `few`
            assert few <= count <= (size if size < 30_000 else 2 * few + 10)
            (expected,) = (logits >= table["logit"][:count].min()).nonzero()
            assert np.array_equal(table["id"][:count], expected)
            assert np.array_equal(table["logit"][:count], logits[expected])
            assert c_functions.find_few(*row, few, table.ctypes.data, count - 1) == 0


def test_the_likeliest_of_equal_and_of_impossible_tokens(c_functions):
    table, largest = (
        np.zeros(4096, sampler.CANDIDATE_DTYPE),
        np.empty(c_functions.count_maxima(9000), np.float32),
    )

    def row(logits):
        return logits.ctypes.data, len(logits), largest.ctypes.data, 0

    equal, impossible = np.zeros(9000, np.float32), np.full(9000, -np.inf, np.float32)
    for few in (1, 40):
        assert [
            c_functions.find_few(*row(logits), few, table.ctypes.data, 4096)
            for logits in (equal, impossible)
        ] == [
            0,
            0,
        ]
    assert c_functions.find_likeliest(*row(equal)) == 0
    assert (
        c_functions.find_likeliest(*row(impossible))
        == c_functions.find_likeliest(*row(np.full(9000, np.nan, np.float32)))
        == -1
    )
    equal[[4097, 4098, 8000]] = 1
    assert c_functions.find_likeliest(*row(equal)) == 4097
    equal[4095] = 1
    assert c_functions.find_likeliest(*row(equal)) == 4095


def test_an_answer_and_its_log_probabilities_equal_those_without_row_c(
    c_functions, stories_gguf, monkeypatch
):
    monkeypatch.setattr(sampler, "min_shortlist_vocabulary", lambda: 0)
    answers = []
    for implementation in (c_functions, None):
        monkeypatch.setattr(
            row_scan, "load_row_scan", lambda implementation=implementation: implementation
        )
        with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1)) as runner:
            warm, greedy = ({"seed": 4, "temp": temp} for temp in (1.2, 0))
            for values in (warm, greedy):
                for options in ({}, {"logprobs": True}, {"logprobs": True, "ignore_eos": True}):
                    sampling = default_sampling().with_values(values)
                    prompt = runner.encode_text("Once")
                    reply = runner.reply(Request(prompt, sampling, 40, **options))
                    for _ in reply:
                        pass
                    answers.append(reply.answer)
    texts = [answer.text for answer in answers]
    assert texts[:6] == texts[6:]
    assert texts[0] == texts[1]
    for number in (1, 2, 4, 5):
        with_c, without_c = (
            [token.logprob for token in answer.tokens]
            for answer in (answers[number], answers[number + 6])
        )
        assert with_c == pytest.approx(without_c, abs=1e-5)
