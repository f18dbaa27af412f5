"""The fast sum of exponentials equals the plain one."""

import numpy as np
import pytest

from llmcli.runtime.binding import softmax


@pytest.mark.parametrize("size", [1, 7, 8, 33, 49_152, 262_144])
@pytest.mark.parametrize("native", [True, False])
def test_both_ways_equal_the_sum_in_double(size, native, monkeypatch):
    if not native:
        monkeypatch.setattr(softmax, "_native", lambda: None)
    logits = np.random.default_rng(size).normal(-5, 6, size).astype(np.float32)
    expected = np.logaddexp.reduce(logits.astype(np.float64))
    before = logits.copy()
    for near in (logits.max(), logits[0], logits.max() - 79, logits.max() - 500, logits.max() + 500, -np.inf):
        assert softmax.LogSumExp()(logits, logits.ctypes.data, float(near)) == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(before, logits)


def test_dropped_tokens_count_for_nothing():
    logits = np.array([0, -np.inf, 0, -np.inf], np.float32)
    assert softmax.LogSumExp()(logits, logits.ctypes.data, 0.0) == pytest.approx(np.log(2))
