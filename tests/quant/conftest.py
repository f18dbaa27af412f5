"""Fixtures of the tests of quant."""

import ctypes
from collections.abc import Iterator

import pytest

from quant.native import ggml, kernels
from quant.native.kernels import LEVELS, Kernels, base_name

MINIMUMS = {**dict(LEVELS), base_name(): 0}


@pytest.fixture(params=MINIMUMS)
def each_kernel_level(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Run the test with each library of our C functions that this CPU can use."""
    level, _ = kernels._cpu_level()
    path = kernels._library_file(request.param)
    if path is None or MINIMUMS[request.param] > level:
        pytest.skip(f"{request.param} is not for this machine")
    opened = Kernels(ctypes.CDLL(str(path)), request.param)
    monkeypatch.setattr(kernels, "open_kernels", lambda: opened)
    functions = ggml.c_function, ggml._encoder  # they remember the library
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()
