"""HubSource through fetch_model: which files of a repository are fetched, and its errors."""

import hashlib
import re
import shutil

import pytest

from llmcli.catalog import fetch
from llmcli.catalog.hub import listing
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.catalog.conftest import REPO, checkpoint_files
from tests.fixtures.hub_faults import Fault


def test_a_fetched_gguf_has_its_commit_and_its_sha256(gguf_hub, gguf, notes):
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.kind == "gguf"
    assert model.path.read_bytes() == gguf
    assert model.sha256 == hashlib.sha256(gguf).hexdigest()
    assert model.revision == gguf_hub.repos[REPO].commit
    assert (model.source, model.nbytes, model.quant) == (f"hub:{REPO}", len(gguf), None)
    assert gguf_hub.gets("tiny-Q8_0.gguf") == []


def test_fetching_a_model_again_makes_no_request(gguf_hub, notes, monkeypatch):
    first = fetch.fetch_model(REPO, load_config(), notes)
    gguf_hub.requests.clear()
    assert fetch.fetch_model(REPO, load_config(), notes) == first
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch.fetch_model(f"hf.co/{REPO}", load_config(), notes) == first
    assert gguf_hub.requests == []


def test_a_type_can_be_given_in_several_spellings(gguf_hub, notes):
    assert fetch.fetch_model(f"{REPO}:q8_0", load_config(), notes).path.name == "tiny-Q8_0.gguf"
    assert (
        fetch.fetch_model(f"hf://{REPO}:q4_k", load_config(), notes).path.name == "tiny-Q4_K_M.gguf"
    )
    assert (
        fetch.fetch_model(f"{REPO}:tiny-Q8_0.gguf", load_config(), notes).path.name
        == "tiny-Q8_0.gguf"
    )


def test_the_error_for_a_missing_type_lists_the_existing_types(gguf_hub, notes):
    with pytest.raises(
        UserError, match=r"has no Q2_K; it has Q4_K_M \(tiny-Q4_K_M.gguf, .* KiB\), Q8_0"
    ):
        fetch.fetch_model(f"{REPO}:Q2_K", load_config(), notes)


def test_the_error_for_a_type_of_two_files_lists_both_with_their_sizes(hub, gguf, notes):
    hub.add(REPO, {"a-Q4_K_M.gguf": gguf, "b-Q4_K_M.gguf": gguf})
    with pytest.raises(
        UserError, match=r"matches Q4_K_M \(a-Q4_K_M.gguf, .*KiB\), Q4_K_M \(b-"
    ) as raised:
        fetch.fetch_model(f"{REPO}:Q4_K_M", load_config(), notes)
    assert raised.value.hint == f"choose one: {REPO}:a-Q4_K_M.gguf"


def test_all_shards_of_a_split_model_are_fetched_and_the_first_is_its_path(hub, gguf, notes):
    names = [f"big-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.add(REPO, dict.fromkeys(reversed(names), gguf))
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.path.name == names[0]
    assert sorted(path.name for path in model.path.parent.iterdir()) == names
    assert model.nbytes == 2 * len(gguf)


def test_a_missing_shard_raises_an_error_before_the_download(hub, gguf, notes):
    hub.add(REPO, {"big-Q4_K_M-00001-of-00002.gguf": gguf})
    with pytest.raises(
        UserError, match=r"big-Q4_K_M-00002-of-00002.gguf of the split model .* is missing"
    ):
        fetch.fetch_model(REPO, load_config(), notes)
    assert hub.gets("big-Q4_K_M-00001-of-00002.gguf") == []


def test_a_checkpoint_is_fetched_without_pickles_and_code(hub, stories, notes):
    hub.add("someone/stories", checkpoint_files(stories))
    model = fetch.fetch_model("someone/stories", load_config(), notes)
    assert (model.kind, model.quant) == ("folder", "Q4_K_M")
    names = {path.name for path in model.path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not names & {"pytorch_model.bin", "modeling_evil.py"}
    assert (model.path / "model.safetensors").read_bytes() == (
        stories / "model.safetensors"
    ).read_bytes()


def test_the_type_in_the_name_of_a_checkpoint_is_the_type_to_quantize_to(hub, stories, notes):
    hub.add("someone/stories", checkpoint_files(stories))
    assert fetch.fetch_model("someone/stories:q8_0", load_config(), notes).quant == "Q8_0"
    assert fetch.fetch_model("someone/stories", load_config(), notes).quant == "Q4_K_M"
    assert len(hub.gets("model.safetensors")) == 1


def test_a_file_that_is_not_a_gguf_raises_an_error_and_gets_no_manifest(hub, notes):
    from llmcli.catalog import store

    hub.add(REPO, {"tiny-Q4_K_M.gguf": b"this is not a model at all" * 9})
    with pytest.raises(UserError):
        fetch.fetch_model(REPO, load_config(), notes)
    assert store.list_manifests(load_config()) == []


def test_a_revision_is_resolved_to_a_commit_that_only_force_updates(gguf_hub, gguf, notes):
    commit = gguf_hub.repos[REPO].commit
    assert fetch.fetch_model(REPO, load_config(), notes, revision="main").revision == commit
    gguf_hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "new": b""})
    assert fetch.fetch_model(REPO, load_config(), notes).revision == commit
    assert (
        fetch.fetch_model(REPO, load_config(), notes, force=True).revision
        == gguf_hub.repos[REPO].commit
        != commit
    )
    assert len(gguf_hub.gets("tiny-Q4_K_M.gguf")) == 1  # the same blob is not fetched again


@pytest.mark.parametrize(
    ("access", "message", "hint"),
    [
        ({"gated": True}, "is gated", "accept them on"),
        ({"token": "secret"}, "no public model", "set HF_TOKEN"),
    ],
)
def test_the_error_for_an_inaccessible_repository_has_a_hint(
    hub, gguf, notes, access, message, hint
):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf}, **access)
    with pytest.raises(UserError, match=message) as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert hint in raised.value.hint


def test_a_private_repository_is_fetched_with_a_token(hub, gguf, notes, monkeypatch):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf}, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf


def test_an_invalid_token_has_another_error_than_a_missing_model(gguf_hub, notes, monkeypatch):
    gguf_hub.bad_tokens = {"old"}
    monkeypatch.setenv("HF_TOKEN", "old")
    with pytest.raises(UserError, match="rejects the token"):
        fetch.fetch_model(REPO, load_config(), notes)


def test_an_unknown_repository_or_revision_raises_an_error(gguf_hub, notes):
    with pytest.raises(UserError, match="no public model no/where"):
        fetch.fetch_model("no/where", load_config(), notes)
    with pytest.raises(UserError, match="has no revision v9"):
        fetch.fetch_model(REPO, load_config(), notes, revision="v9")
    with pytest.raises(UserError, match="is not a valid revision"):
        fetch.fetch_model(REPO, load_config(), notes, revision="../../x")


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, "failed with status 500"), (429, "too many requests"), (403, "needs a token")],
)
def test_a_status_of_the_hub_is_explained(gguf_hub, notes, status, message):
    gguf_hub.status = status
    with pytest.raises(UserError, match=message):
        fetch.fetch_model(REPO, load_config(), notes)


def test_the_error_without_a_network_has_a_hint(notes, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"no connection to http://127.0.0.1:9") as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert "HF_ENDPOINT" in raised.value.hint


def test_offline_makes_no_request(gguf_hub, notes, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="llmcli is offline"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert gguf_hub.requests == []


def test_offline_uses_a_file_that_another_program_downloaded(gguf_hub, gguf, notes, monkeypatch):
    from huggingface_hub import hf_hub_download

    hf_hub_download(
        REPO,
        "tiny-Q4_K_M.gguf",
        cache_dir=load_config().hub_cache,
        endpoint=gguf_hub.url,
        token=False,
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gguf_hub.requests.clear()
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert gguf_hub.requests == []


def test_files_with_unsafe_names_are_ignored(hub, gguf, notes):
    hub.add(REPO, {"../../evil-Q4_K_M.gguf": gguf, "tiny-Q4_K_M.gguf": gguf})
    assert fetch.fetch_model(REPO, load_config(), notes).path.name == "tiny-Q4_K_M.gguf"


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        "null",
        "[]",
        "[" * 100_000,
        '{"id": "a/b", "siblings": 5}',
        '{"id": "a/b", "sha": 5}',
        '{"id": "a/b", "siblings": [{"rfilename": 5}]}',
        '{"id": "a/b", "siblings": [{"rfilename": "x", "size": "1", "blobId": "b"}]}',
        '{"id": "a/b", "siblings": [{"rfilename": "x", "size": -1, "blobId": "%s"}]}' % ("b" * 40),
        '{"id": "a/b", "siblings": [{"rfilename": "x", "size": 1, "lfs": {"sha256": 5, "size": 1, "pointerSize": 1}}]}',
    ],
)
def test_an_invalid_listing_raises_an_error(notes, monkeypatch, hub, answer):
    monkeypatch.setattr(
        "tests.fixtures.fake_hub._Handler.answer", lambda self: self.reply(200, answer.encode(), {})
    )
    with pytest.raises(UserError, match=r"does not answer like a hub|gives no valid (size|commit)"):
        fetch.fetch_model(REPO, load_config(), notes)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503),
        Fault(status=429),
        Fault(status=407),
        Fault(redirect="loop"),
        Fault(pace="reset"),
        Fault(body="page"),
        Fault(body="truncated"),
    ],
    ids=lambda fault: fault.label,
)
def test_a_model_in_the_cache_is_used_if_the_hub_does_not_answer(gguf_hub, gguf, notes, fault):
    commit = fetch.fetch_model(REPO, load_config(), notes).revision
    shutil.rmtree(load_config().data)
    gguf_hub.misbehave("listing", fault)
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert (model.path.read_bytes(), model.revision) == (gguf, commit)
    (line,) = [line for line in notes.lines if "from the Hugging Face cache" in line]
    assert f"commit {commit[:12]} (--offline does not ask the hub)" in line
    with pytest.raises(UserError) as raised:  # which asks for the newest commit
        fetch.fetch_model(REPO, load_config(), notes, force=True)
    assert str(raised.value) in line
    with pytest.raises(UserError, match=re.escape(str(raised.value))):  # it is not in the cache
        fetch.fetch_model(f"{REPO}:Q8_0", load_config(), notes)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_the_cache_is_not_used_instead_of_what_the_hub_answers(gguf_hub, notes, status):
    fetch.fetch_model(REPO, load_config(), notes)
    shutil.rmtree(load_config().data)
    gguf_hub.misbehave("listing", Fault(status=status))
    with pytest.raises(UserError):
        fetch.fetch_model(REPO, load_config(), notes)


@pytest.mark.parametrize(
    "name",
    ["\ud800.gguf", "a\x1b[31m.gguf", "a\x9b.gguf", "x" * 256, "a//b", "/a", "a/../b", "C:a"],
)
def test_a_name_that_cannot_be_a_path_is_left_out_with_a_note(hub, gguf, notes, monkeypatch, name):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, name: gguf})
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    (line,) = [line for line in notes.lines if "left out" in line]
    assert line.isascii()
    assert line.isprintable()


def test_a_listing_that_is_too_long_raises_an_error(gguf_hub, notes, monkeypatch):
    monkeypatch.setattr(listing, "MAX_LISTING_BYTES", 100)
    with pytest.raises(UserError, match="sends more than 100 bytes instead of a list of files"):
        fetch.fetch_model(REPO, load_config(), notes)


@pytest.mark.parametrize("token", ["hf_\n", "hf_\xe9", "hf_a b", "\u202ehf"])
def test_a_token_that_cannot_be_sent_raises_an_error(gguf_hub, notes, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", f"x{token}x")
    with pytest.raises(UserError, match="the hub's token has a character that no token has"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert gguf_hub.requests == []


def test_proxy_settings_that_cannot_be_used_raise_an_error(gguf_hub, notes, monkeypatch):
    from huggingface_hub import close_session

    monkeypatch.setenv("ALL_PROXY", "gopher://127.0.0.1:1")
    close_session()
    with pytest.raises(UserError, match="the proxy or certificate settings cannot be used"):
        fetch.fetch_model(REPO, load_config(), notes)
    close_session()


def test_a_web_page_instead_of_a_listing_raises_an_error(notes, monkeypatch, hub):
    monkeypatch.setattr(
        "tests.fixtures.fake_hub._Handler.answer",
        lambda self: self.reply(200, b"<html>welcome</html>", {}),
    )
    with pytest.raises(UserError, match="does not answer like a hub"):
        fetch.fetch_model(REPO, load_config(), notes)
