"""-t also limits numpy's threads."""

import threadpoolctl

from quant.native import blas_threads


def threads() -> set[int]:
    return {
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    }


def test_products_take_as_many_threads_as_were_given_and_all_again_behind() -> None:
    with blas_threads.limit_threads(3):
        before = threads()
        with blas_threads.limit_threads(1):
            assert threads() <= {1}
        with blas_threads.limit_threads(None):
            assert threads() == before
        assert threads() == before
