"""`llmcli show`: a file's certificate, and whether it matches the bytes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quant.certificate import certificate, embed
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf
from tests.quant.certificate.test_certificate import certified, flip, write

Llmcli = Callable[..., Done]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    file = write(tiny_gguf.llama(folder / "tiny-F32.gguf", layers=2), folder / "tiny-Q4_K_M.gguf")
    embed.embed_certificate(file, certified(file))
    return file


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made, tmp_path / made.name))


def test_people_and_programs_are_told(llmcli: Llmcli, file: Path) -> None:
    done = llmcli("show", str(file), "--check")
    assert done.code == 0
    for words in (
        "Certificate",
        "all bytes were checked",
        "mean KLD",
        "calibration.txt",
        "sha256",
    ):
        assert words in done.out
    said = json.loads(llmcli("show", str(file), "--json").out)["certificate"]
    assert (said["belongs"], said["checked"], said["answers"]["kld"]) == (
        True,
        False,
        {"value": 1.5, "error": 0.25},
    )


def test_a_changed_tensor_is_told_and_fails_the_check(llmcli: Llmcli, file: Path) -> None:
    flip(max(read_header.read_header(file).tensors, key=lambda one: one.nbytes))
    assert llmcli("show", str(file)).code == 0
    done = llmcli("show", str(file), "--check", "--json")
    assert done.code == 1
    assert "its tensors were changed after they were verified" in done.err
    said = json.loads(done.out)["certificate"]
    assert (said["belongs"], said["checked"]) == (False, True)


def test_a_file_without_one_is_shown_and_cannot_be_checked(llmcli: Llmcli, tmp_path: Path) -> None:
    plain = tiny_gguf.llama(tmp_path / "plain.gguf", hidden=64, ff=64, layers=1)
    done = llmcli("show", str(plain), "--json")
    assert (done.code, json.loads(done.out)["certificate"]) == (0, None)
    refused = llmcli("show", str(plain), "--check")
    assert refused.code == 1
    assert "has no certificate" in refused.err


def test_a_damaged_certificate_is_a_warning(
    llmcli: Llmcli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(certificate.Certificate, "to_json", lambda self: "{")
        embed.embed_certificate(file, certified(file))
    done = llmcli("show", str(file))
    assert done.code == 0
    assert "warning: the certificate in" in done.err
    assert "cannot be read" in done.err
