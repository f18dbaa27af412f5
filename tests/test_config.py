"""What the environment says."""

import os
import subprocess
import sys

import pytest

from llmcli import config

ZEN5 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"
ARCHITECTURE = """
from llmcli import config
config.wide_products()
import numpy
from threadpoolctl import threadpool_info
print(*[pool["architecture"] for pool in threadpool_info() if pool["internal_api"] == "openblas"])
"""


@pytest.fixture
def untold(monkeypatch):
    """No kernels are named, and none are once the test is over."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "")
    monkeypatch.delenv("OPENBLAS_CORETYPE")


@pytest.mark.parametrize(
    ("told", "kernels"),
    [
        (ZEN5, "SkylakeX"),
        (ZEN5.replace(" avx512vl", ""), None),
        (ZEN5.replace("AuthenticAMD", "GenuineIntel"), None),  # whose kernels OpenBLAS finds by itself
        ("processor\t: 0\nFeatures\t: fp asimd\n", None),
        (None, None),
    ],
)
def test_numpy_is_told_of_an_amd_processor_s_avx_512(told, kernels, tmp_path, untold):
    info = tmp_path / "cpuinfo"
    if told is not None:
        info.write_text(told)
    config.wide_products(info)
    assert os.environ.get("OPENBLAS_CORETYPE") == kernels


def test_kernels_that_the_user_names_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    info = tmp_path / "cpuinfo"
    info.write_text(ZEN5)
    config.wide_products(info)
    assert os.environ["OPENBLAS_CORETYPE"] == "Haswell"


def test_openblas_takes_the_kernels_that_it_is_told_of(untold):
    config.wide_products()
    if "OPENBLAS_CORETYPE" not in os.environ:
        pytest.skip("this processor needs no telling")
    done = subprocess.run([sys.executable, "-c", ARCHITECTURE], capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["SkylakeX"], [])  # none where numpy has another BLAS


def test_a_token_file_that_is_no_text_counts_as_not_logged_in(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe\x00")
    assert config.load({"LLMCLI_HOME": str(tmp_path), "HF_TOKEN_PATH": str(file)}).hub_token is None
    file.write_text("hf_abc\n")
    assert config.load({"LLMCLI_HOME": str(tmp_path), "HF_TOKEN_PATH": str(file)}).hub_token == "hf_abc"
