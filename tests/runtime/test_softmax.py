"""The fast sums of exponentials equal the plain one, and see the same columns."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from llmcli.runtime.binding import sampler, softmax
from llmcli.runtime.ranked import peaks, shortlist
from llmcli.runtime.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import defaults

SOURCE = Path(softmax.__file__).with_name("row.c")


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
        command = [compiler, "-O3", "-ffp-contract=fast", *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(out)]
        subprocess.run(command, check=True)
        made[name] = softmax.declared(ctypes.CDLL(str(out)).llmcli_look)
    return made


@pytest.fixture(params=BUILDS)
def own(request, builds):
    """One build of row.c."""
    return builds[request.param]


@pytest.fixture(params=[*BUILDS, "ggml", "numpy"])
def way(request, monkeypatch):
    """Each way that a build of llama.cpp may leave."""
    own = request.getfixturevalue("builds")[request.param] if request.param in BUILDS else None
    monkeypatch.setattr(softmax, "_own", lambda: own)
    if request.param == "numpy":
        monkeypatch.setattr(softmax, "_native", lambda: None)


@pytest.mark.parametrize("size", [1, 7, 8, 33, 4095, 4097, 49_152, 262_144, 262_187])
def test_every_way_equals_the_sum_in_double_and_numpys_columns(size, way):
    logits = np.random.default_rng(size).normal(-5, 6, size).astype(np.float32)
    expected = np.logaddexp.reduce(logits.astype(np.float64))
    before = logits.copy()
    most = logits.max()
    for near, off in ((most, 0), (most - 4, 0), (logits[0], 1e-5), (most - 79, 1e-5), (most - 500, 0), (most + 500, 0),
                      (-np.inf, 0)):  # fmt: skip
        both = softmax.LogSumExp()
        total, largest = both.with_peaks(logits, logits.ctypes.data, float(near))
        assert total == both(logits, logits.ctypes.data, float(near))
        assert total == pytest.approx(expected, rel=1e-6, abs=off or 1e-6)
        assert np.array_equal(largest, peaks(logits))
    assert np.array_equal(before, logits)


def test_dropped_tokens_count_for_nothing(way):
    logits = np.array([0, -np.inf, 0, -np.inf], np.float32)
    assert softmax.LogSumExp()(logits, logits.ctypes.data, 0.0) == pytest.approx(np.log(2))


def test_a_row_with_nan_or_infinity_gives_none_and_numpys_columns(way):
    for odd in (np.nan, np.inf, np.uint32(0x7FC00001).view(np.float32)):
        for place in (0, 4096, 5000):
            logits = np.linspace(-3, 3, 5001, dtype=np.float32)
            logits[place] = odd
            total, largest = softmax.LogSumExp().with_peaks(logits, logits.ctypes.data, 3.0)
            assert np.isnan(total)
            assert np.array_equal(largest, peaks(logits), equal_nan=True)


def test_our_exponential_is_within_two_units_in_the_last_place(own):
    values = np.concatenate([np.linspace(-87, 88, 4001), np.linspace(-0.4, 0.4, 1001)]).astype(np.float32)
    found = [own(values[at:].ctypes.data, 1, 0, 0.0, None) for at in range(len(values))]
    exact = np.exp(values.astype(np.float64))
    assert np.all(np.abs(found - exact) <= 2 * np.spacing(exact.astype(np.float32)))
    far = np.array([-np.inf, -1e30, -87.5, 88.5, 1e30, np.inf], np.float32)
    assert [own(far[at:].ctypes.data, 1, 0, 0.0, None) for at in range(6)] == [0, 0, 0, np.inf, np.inf, np.inf]


def test_the_shortlist_of_known_columns_is_the_same(way):
    logits = np.random.default_rng(1).normal(0, 3, 30_001).astype(np.float32)
    _, largest = softmax.LogSumExp().with_peaks(logits, logits.ctypes.data, 9.0)
    known, found = shortlist(logits, 40, largest), shortlist(logits, 40)
    assert known.least == found.least
    assert np.array_equal(known.columns, found.columns)
    assert np.array_equal(known.values, found.values)


def test_an_answer_and_its_log_probabilities_are_the_same_every_way(own, stories_gguf, monkeypatch):
    monkeypatch.setattr(sampler, "MANY", 0)
    answers = []
    for way in (own, None):
        monkeypatch.setattr(softmax, "_own", lambda way=way: way)
        with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1)) as runner:
            sampling = defaults().with_values({"seed": 4, "temp": 1.2})
            for more in ({}, {"logprobs": True}, {"logprobs": True, "ignore_eos": True}):
                reply = runner.reply(Request(runner.encode_text("Once"), sampling, 40, **more))
                for _ in reply:
                    pass
                answers.append(reply.answer)
    texts = [answer.text for answer in answers]
    assert texts[:3] == texts[3:]
    assert texts[0] == texts[1]
    for ours, other in zip(answers[1:3], answers[4:], strict=True):
        assert [one.logprob for one in ours.tokens] == pytest.approx([one.logprob for one in other.tokens], abs=1e-5)
