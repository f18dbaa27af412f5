"""`llmcli show` of a file with a certificate, and --check, which compares the certificate with the
bytes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quant.certificate import certificate, embed
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf
from tests.quant.certificate.test_certificate import example_certificate, flip, write

Llmcli = Callable[..., Done]


@pytest.fixture(scope="module")
def certified_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Q4_K_M file with a certificate, shared by the tests of this module."""
    folder = tmp_path_factory.mktemp("made")
    file = write(tiny_gguf.llama(folder / "tiny-F32.gguf", layers=2), folder / "tiny-Q4_K_M.gguf")
    embed.embed_certificate(file, example_certificate(file))
    return file


@pytest.fixture
def file(certified_file: Path, tmp_path: Path) -> Path:
    """A copy of the certified file that a test may change."""
    return Path(shutil.copy(certified_file, tmp_path / certified_file.name))


def test_the_certificate_is_printed_and_in_the_json(llmcli: Llmcli, file: Path) -> None:
    done = llmcli("show", str(file), "--check")
    assert done.code == 0
    for text in (
        "Certificate",
        "all bytes were checked",
        "mean KLD",
        "calibration.txt",
        "sha256",
    ):
        assert text in done.out
    document = json.loads(llmcli("show", str(file), "--json").out)["certificate"]
    assert (document["belongs"], document["checked"], document["answers"]["kld"]) == (
        True,
        False,
        {"value": 1.5, "error": 0.25},
    )


def test_check_fails_for_a_changed_tensor(llmcli: Llmcli, file: Path) -> None:
    flip(max(read_header.read_header(file).tensors, key=lambda tensor: tensor.nbytes))
    assert llmcli("show", str(file)).code == 0
    done = llmcli("show", str(file), "--check", "--json")
    assert done.code == 1
    assert "its tensors were changed after they were verified" in done.err
    document = json.loads(done.out)["certificate"]
    assert (document["belongs"], document["checked"]) == (False, True)


def test_a_file_without_a_certificate_cannot_be_checked(llmcli: Llmcli, tmp_path: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "plain.gguf", hidden=64, ff=64, layers=1)
    done = llmcli("show", str(model), "--json")
    assert (done.code, json.loads(done.out)["certificate"]) == (0, None)
    refused = llmcli("show", str(model), "--check")
    assert refused.code == 1
    assert "has no certificate" in refused.err


def test_a_damaged_certificate_is_a_warning(
    llmcli: Llmcli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(certificate.Certificate, "to_json", lambda self: "{")
        embed.embed_certificate(file, example_certificate(file))
    done = llmcli("show", str(file))
    assert done.code == 0
    assert "warning: the certificate in" in done.err
    assert "cannot be read" in done.err
