"""The thread that computes passes calls llama_decode once for each pass, and is not used with the
library of another version.
"""

import ctypes
from types import SimpleNamespace

import pytest

from llmcli.runtime.binding.kernels import pass_thread
from llmcli.runtime.binding.library import lib


def test_a_library_of_another_version_is_not_used() -> None:
    assert pass_thread.declare_functions(SimpleNamespace()) is None
    size = ctypes.sizeof(lib().llama_batch) + 8
    other = SimpleNamespace(llmcli_pass_batch_size=lambda: size)
    assert pass_thread.declare_functions(other) is None


def test_each_pass_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pass_thread.load_library()
    if library is None:
        pytest.skip("llmcli's C code is not installed")
    calls: list[tuple[int, int]] = []
    waits: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, lib().llama_batch)
    def decode(context: int, batch: ctypes.Structure) -> int:
        calls.append((context, batch.n_tokens))
        return batch.n_tokens % 3

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def synchronize(context: int) -> None:
        assert calls[-1][0] == context
        waits.append(calls[-1][1])

    monkeypatch.setattr(lib(), "llama_decode", decode)
    monkeypatch.setattr(lib(), "llama_synchronize", synchronize)
    thread, batch = pass_thread.PassThread(library, 64), lib().llama_batch()
    for count in range(1, 200):
        batch.n_tokens = count
        thread.begin(batch)
        code, seconds = thread.end()
        assert code == count % 3
        assert seconds >= 0
    batch.n_tokens = 200
    thread.begin(batch)
    thread.close()
    assert calls == [(64, count) for count in range(1, 201)]
    assert waits == [count for _, count in calls]
