"""The limit of threads also applies to the BLAS library of numpy."""

import threadpoolctl

from quant.native import blas_threads


def threads() -> set[int]:
    return {
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    }


def test_thread_limit_applies_within_the_context_only() -> None:
    with blas_threads.limit_threads(3):
        before = threads()
        with blas_threads.limit_threads(1):
            assert threads() <= {1}
        with blas_threads.limit_threads(None):
            assert threads() == before
        assert threads() == before
