"""The fast sums of exponentials equal the plain one, and the C row scan equals numpy."""

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


BUILDS = {"this CPU": ["-march=native"], "any CPU": []}


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """row.c by itself: the libggml-base that is installed may be without it."""
    compiler = shutil.which("gcc")
    if not compiler:
        pytest.skip("row.c is for GCC, which is not here")
    made = {}
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
        made[name] = row_scan.declare_functions(ctypes.CDLL(str(out)))
    return made


@pytest.fixture(params=BUILDS)
def own(request, builds):
    """One build of row.c."""
    return builds[request.param]


@pytest.fixture(params=[*BUILDS, "ggml", "numpy"])
def way(request, monkeypatch):
    """Each way that a build of llama.cpp may leave."""
    own = request.getfixturevalue("builds")[request.param] if request.param in BUILDS else None
    monkeypatch.setattr(row_scan, "load_row_scan", lambda: own)
    if request.param == "numpy":
        monkeypatch.setattr(log_sum_exp, "_native", lambda: None)


@pytest.mark.parametrize("size", [1, 7, 8, 33, 4095, 4097, 49_152, 262_144, 262_187])
def test_every_way_equals_the_sum_in_double_and_sees_the_likeliest(size, way):
    logits = np.random.default_rng(size).normal(-5, 6, size).astype(np.float32)
    expected = np.logaddexp.reduce(logits.astype(np.float64))
    before = logits.copy()
    most = logits.max()
    for near, off in (
        (most, 0),
        (most - 4, 0),
        (logits[0], 1e-5),
        (most - 79, 1e-5),
        (most - 500, 0),
        (most + 500, 0),
        (-np.inf, 0),
    ):
        both, strands = log_sum_exp.LogSumExp(), row_scan.RowMaxima()
        total = both.with_maxima(logits, logits.ctypes.data, float(near), strands)
        assert total == both(logits, logits.ctypes.data, float(near))
        assert total == pytest.approx(expected, rel=1e-6, abs=off or 1e-6)
        if own := row_scan.load_row_scan():
            place, known = strands.consume(size)
            assert known == bool(np.isfinite(near))
            assert not strands.consume(size)[1]
            assert own.find_likeliest(logits.ctypes.data, size, place, known) == logits.argmax()
    assert np.array_equal(before, logits)


def test_dropped_tokens_count_for_nothing(way):
    logits = np.array([0, -np.inf, 0, -np.inf], np.float32)
    assert log_sum_exp.LogSumExp()(logits, logits.ctypes.data, 0.0) == pytest.approx(np.log(2))


def test_a_row_with_nan_or_infinity_gives_none(way):
    for odd in (np.nan, np.inf, np.uint32(0x7FC00001).view(np.float32)):
        for place in (0, 4096, 5000):
            logits = np.linspace(-3, 3, 5001, dtype=np.float32)
            logits[place] = odd
            strands = row_scan.RowMaxima()
            assert np.isnan(
                log_sum_exp.LogSumExp().with_maxima(logits, logits.ctypes.data, 3.0, strands)
            )
            assert row_scan.load_row_scan() is None or np.isinf(odd) or not strands.consume(5001)[1]


def test_our_exponential_is_within_two_units_in_the_last_place(own):
    values = np.concatenate([np.linspace(-87, 88, 4001), np.linspace(-0.4, 0.4, 1001)]).astype(
        np.float32
    )
    found = [own.sum_exp(values[at:].ctypes.data, 1, 0.0, None) for at in range(len(values))]
    exact = np.exp(values.astype(np.float64))
    assert np.all(np.abs(found - exact) <= 2 * np.spacing(exact.astype(np.float32)))
    far = np.array([-np.inf, -1e30, -87.5, 88.8, 500], np.float32)
    found = [own.sum_exp(far[at:].ctypes.data, 1, 0.0, None) for at in range(len(far))]
    assert found == pytest.approx([0, 0, 0, np.inf, np.inf], abs=1e-37)
    beyond = np.array([1e30, np.inf, np.nan], np.float32)
    assert not np.isfinite(
        [own.sum_exp(beyond[at:].ctypes.data, 1, 0.0, None) for at in range(len(beyond))]
    ).any()


@pytest.mark.parametrize("size", [16, 300, 4096, 4100, 30_001, 262_144])
def test_our_likeliest_are_the_likeliest_and_all_that_reach_their_least(own, size):
    table = np.zeros(4096, sampler.CANDIDATE_DTYPE)
    for seed, few in ((1, 40), (2, 1), (3, 256)):
        logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
        logits[::7] = -np.inf
        largest = np.empty(own.count_maxima(size), np.float32)
        for known in (0, 1):
            row = logits.ctypes.data, size, largest.ctypes.data, known
            assert own.find_likeliest(*row) == logits.argmax()
            count = own.find_few(*row, few, table.ctypes.data, len(table))
            if size < 4096 and not count:
                continue  # fewer strands than wanted
            assert few <= count <= (size if size < 30_000 else 2 * few + 10)
            (expected,) = (logits >= table["logit"][:count].min()).nonzero()
            assert np.array_equal(table["id"][:count], expected)
            assert np.array_equal(table["logit"][:count], logits[expected])
            assert own.find_few(*row, few, table.ctypes.data, count - 1) == 0


def test_our_likeliest_of_equal_and_of_impossible_tokens(own):
    table, largest = (
        np.zeros(4096, sampler.CANDIDATE_DTYPE),
        np.empty(own.count_maxima(9000), np.float32),
    )

    def row(logits):
        return logits.ctypes.data, len(logits), largest.ctypes.data, 0

    same, none = np.zeros(9000, np.float32), np.full(9000, -np.inf, np.float32)
    for few in (1, 40):
        assert [own.find_few(*row(odd), few, table.ctypes.data, 4096) for odd in (same, none)] == [
            0,
            0,
        ]
    assert own.find_likeliest(*row(same)) == 0
    assert (
        own.find_likeliest(*row(none))
        == own.find_likeliest(*row(np.full(9000, np.nan, np.float32)))
        == -1
    )
    same[[4097, 4098, 8000]] = 1
    assert own.find_likeliest(*row(same)) == 4097
    same[4095] = 1
    assert own.find_likeliest(*row(same)) == 4095


def test_an_answer_and_its_log_probabilities_are_the_same_every_way(own, stories_gguf, monkeypatch):
    monkeypatch.setattr(sampler, "min_shortlist_vocabulary", lambda: 0)
    answers = []
    for way in (own, None):
        monkeypatch.setattr(row_scan, "load_row_scan", lambda way=way: way)
        with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1)) as runner:
            warm, greedy = ({"seed": 4, "temp": temp} for temp in (1.2, 0))
            for values in (warm, greedy):
                for more in ({}, {"logprobs": True}, {"logprobs": True, "ignore_eos": True}):
                    sampling = default_sampling().with_values(values)
                    reply = runner.reply(Request(runner.encode_text("Once"), sampling, 40, **more))
                    for _ in reply:
                        pass
                    answers.append(reply.answer)
    texts = [answer.text for answer in answers]
    assert texts[:6] == texts[6:]
    assert texts[0] == texts[1]
    for at in (1, 2, 4, 5):
        ours, other = ([one.logprob for one in answers[which].tokens] for which in (at, at + 6))
        assert ours == pytest.approx(other, abs=1e-5)
