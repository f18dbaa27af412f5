"""`llmcli show` of a file with a certificate, and --check, which compares the certificate with the
bytes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.runtime.drafting.draft_files.heads_file import BLOCKWISE, MEDUSA, HeadShapes
from quant.certificate import certificate, embed
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.fixtures.draft_heads import write_heads
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


@pytest.mark.parametrize("method", [MEDUSA, BLOCKWISE, "EAGLE-3"])
def test_a_draft_file_is_named_with_its_use(method: str, llmcli: Llmcli, tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    if method == "EAGLE-3":
        tiny_gguf.eagle3(path)
        kind = "EAGLE-3 draft for the model that it was trained on"
    else:
        model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, layers=1, tied=True)
        hidden = 0 if method == MEDUSA else 32
        write_heads(path, HeadShapes(method, 64, 300, 4, 1, hidden, False), model)
        kind = f"{method} draft heads for the model"
    done = llmcli("show", str(path))
    assert done.code == 0, done.err
    (use,) = (line for line in done.out.splitlines() if line.strip().startswith("use "))
    assert kind in use
    assert use.endswith(f"llmcli run MODEL -md '{path}'")
    for wrong in ("base model", "chat template", "context length  0"):
        assert wrong not in done.out
    assert ("Tokenizer" in done.out) == (method == "EAGLE-3")
    length = json.loads(llmcli("show", str(path), "--json").out)["context_length"]
    assert (length is None) == (method != "EAGLE-3")


def test_a_model_says_whether_it_has_a_template(llmcli: Llmcli, tmp_path: Path) -> None:
    done = llmcli("show", str(tiny_gguf.llama(tmp_path / "m.gguf", layers=1)))
    assert "chat template   no: this is a base model" in done.out
    assert "  use " not in done.out
