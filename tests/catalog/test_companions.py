"""`pull --with`: companions are fetched only if they are named, recorded, and removed with their
model.
"""

import json
from pathlib import Path

import pytest

from llmcli.catalog.companions import choose_companion
from llmcli.catalog.hub.choose_files import HubFile
from tests.catalog.conftest import REPO

FILES = (
    "tiny-Q4_K_M.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
    "mtp-tiny-F16.gguf",
    "mtp-tiny-Q4_K_M.gguf",
)


@pytest.fixture
def companion_hub(hub, gguf):
    """A hub with a GGUF and its companions."""
    hub.add(REPO, {name: gguf if name.startswith("tiny") else name.encode() for name in FILES})
    return hub


def test_companions_are_downloaded_only_if_they_are_named(llmcli, companion_hub) -> None:
    done = llmcli("pull", REPO, "--json")
    assert "companions" not in json.loads(done.out)
    assert "also has mmproj, mtp" in done.err
    assert not [name for name in FILES[1:] if companion_hub.gets(name)]


def test_named_companions_are_downloaded_beside_the_model(llmcli, companion_hub) -> None:
    done = llmcli("pull", REPO, "--with", "mmproj, mtp", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert {kind: path.rpartition("/")[2] for kind, path in result["companions"].items()} == {
        "mmproj": "mmproj-F16.gguf",
        "mtp": "mtp-tiny-Q4_K_M.gguf",
    }
    for path in result["companions"].values():
        assert Path(path).read_bytes() == Path(path).name.encode()
    assert result["bytes"] == len(companion_hub.repos[REPO].files["tiny-Q4_K_M.gguf"])


def test_a_companion_of_a_model_on_this_disk_is_added_once(llmcli, companion_hub) -> None:
    assert llmcli("pull", REPO).code == 0
    assert llmcli("pull", REPO, "--with", "mmproj").code == 0
    companion_hub.requests.clear()
    done = llmcli("pull", REPO, "--with", "mmproj", "--offline")
    assert done.code == 0, done.err
    assert "mmproj: " in done.out
    assert companion_hub.requests == []
    offline = llmcli("pull", REPO, "--with", "mtp", "--offline")
    assert offline.code == 1
    assert "llmcli is offline" in offline.err


def test_rm_deletes_companions_with_the_model(llmcli, companion_hub) -> None:
    done = llmcli("pull", REPO, "--with", "mmproj,mtp", "--json")
    paths = [Path(path) for path in json.loads(done.out)["companions"].values()]
    assert llmcli("gc").code == 0
    assert all(path.exists() for path in paths)
    assert llmcli("rm", REPO).code == 0
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("kinds", "code", "message"),
    [
        ("eagle3", 1, "has no eagle3 file; it has mmproj, mtp"),
        ("vision", 2, "there is no kind 'vision'"),
        ("mmproj,,", 2, "there is no kind ''"),
    ],
)
def test_kinds_that_do_not_exist_are_refused(
    llmcli, companion_hub, kinds: str, code: int, message: str
) -> None:
    done = llmcli("pull", REPO, "--with", kinds)
    assert done.code == code
    assert message in done.err


def test_a_model_that_is_not_from_the_hub_has_no_companions(llmcli, stories_gguf) -> None:
    done = llmcli("pull", str(stories_gguf), "--with", "mmproj")
    assert done.code == 1
    assert "is not a GGUF of the hub" in done.err


def test_a_draft_head_of_the_type_of_the_model_is_preferred_to_a_larger_one() -> None:
    blobs = [HubFile(name, 1, "") for name in FILES]
    choose = [
        choose_companion("mtp", model, REPO, blobs).name
        for model in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny-00001-of-00002.gguf")
    ]
    assert choose == ["mtp-tiny-Q4_K_M.gguf", "mtp-tiny-F16.gguf", "mtp-tiny-F16.gguf"]
