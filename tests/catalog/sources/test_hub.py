import hashlib
from pathlib import Path

import pytest

from llmcli.catalog import fetch
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.fixtures.fake_hub import Hub

REPO = "someone/Tiny-GGUF"


@pytest.fixture
def published(hub: Hub, gguf: bytes) -> Hub:
    """A repository with two types, a helper file and a pickle."""
    hub.add(
        REPO,
        {
            "tiny-Q4_K_M.gguf": gguf,
            "tiny-Q8_0.gguf": gguf + bytes(32),
            "mmproj-Q4_K_M.gguf": b"x",
            "a.bin": b"x",
        },
    )
    return hub


def checkpoint(stories: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in stories.iterdir() if path.name != "NOTICE"}
    return files | {
        "pytorch_model.bin": b"pickle",
        "modeling_evil.py": b"code",
        "README.md": b"words",
    }


def test_a_gguf_is_pinned_to_its_commit_and_verified(published, gguf, notes):
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.kind == "gguf"
    assert model.path.read_bytes() == gguf
    assert model.sha256 == hashlib.sha256(gguf).hexdigest()
    assert model.revision == published.repos[REPO].commit
    assert (model.source, model.nbytes, model.quant) == (f"hub:{REPO}", len(gguf), None)
    assert published.gets("tiny-Q8_0.gguf") == []


def test_it_lies_in_the_ordinary_cache_where_the_library_finds_it(published, gguf, notes):
    from huggingface_hub import hf_hub_download, scan_cache_dir

    fetch.fetch_model(REPO, load_config(), notes)
    found = hf_hub_download(
        REPO, "tiny-Q4_K_M.gguf", cache_dir=load_config().hub_cache, local_files_only=True
    )
    assert Path(found).read_bytes() == gguf
    cache = scan_cache_dir(load_config().hub_cache)
    assert [repo.repo_id for repo in cache.repos] == [REPO]
    assert not cache.warnings


def test_the_second_time_needs_no_network(published, notes, monkeypatch):
    first = fetch.fetch_model(REPO, load_config(), notes)
    published.requests.clear()
    assert fetch.fetch_model(REPO, load_config(), notes) == first
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch.fetch_model(f"hf.co/{REPO}", load_config(), notes) == first
    assert published.requests == []


def test_a_type_is_found_in_any_spelling(published, notes):
    assert fetch.fetch_model(f"{REPO}:q8_0", load_config(), notes).path.name == "tiny-Q8_0.gguf"
    assert (
        fetch.fetch_model(f"hf://{REPO}:q4_k", load_config(), notes).path.name == "tiny-Q4_K_M.gguf"
    )
    assert (
        fetch.fetch_model(f"{REPO}:tiny-Q8_0.gguf", load_config(), notes).path.name
        == "tiny-Q8_0.gguf"
    )


def test_a_type_that_is_not_there_is_answered_with_those_that_are(published, notes):
    with pytest.raises(
        UserError, match=r"has no Q2_K; it has Q4_K_M \(tiny-Q4_K_M.gguf, .* KiB\), Q8_0"
    ):
        fetch.fetch_model(f"{REPO}:Q2_K", load_config(), notes)


def test_a_type_that_fits_two_files_is_answered_with_both_and_their_sizes(hub, gguf, notes):
    hub.add(REPO, {"a-Q4_K_M.gguf": gguf, "b-Q4_K_M.gguf": gguf})
    with pytest.raises(
        UserError, match=r"matches Q4_K_M \(a-Q4_K_M.gguf, .*KiB\), Q4_K_M \(b-"
    ) as raised:
        fetch.fetch_model(f"{REPO}:Q4_K_M", load_config(), notes)
    assert raised.value.hint == f"choose one: {REPO}:a-Q4_K_M.gguf"


def test_all_shards_of_a_split_model_are_fetched_and_the_first_is_named(hub, gguf, notes):
    names = [f"big-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.add(REPO, dict.fromkeys(reversed(names), gguf))
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.path.name == names[0]
    assert sorted(path.name for path in model.path.parent.iterdir()) == names
    assert model.nbytes == 2 * len(gguf)


def test_a_missing_shard_is_told_before_anything_is_fetched(hub, gguf, notes):
    hub.add(REPO, {"big-Q4_K_M-00001-of-00002.gguf": gguf})
    with pytest.raises(
        UserError, match=r"big-Q4_K_M-00002-of-00002.gguf of the split model .* is missing"
    ):
        fetch.fetch_model(REPO, load_config(), notes)
    assert hub.gets("big-Q4_K_M-00001-of-00002.gguf") == []


def test_a_checkpoint_comes_without_pickles_and_code(hub, stories, notes):
    hub.add("someone/stories", checkpoint(stories))
    model = fetch.fetch_model("someone/stories", load_config(), notes)
    assert (model.kind, model.quant) == ("folder", "Q4_K_M")
    names = {path.name for path in model.path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not names & {"pytorch_model.bin", "modeling_evil.py"}
    assert (model.path / "model.safetensors").read_bytes() == (
        stories / "model.safetensors"
    ).read_bytes()


def test_the_type_in_the_name_of_a_checkpoint_is_what_it_becomes(hub, stories, notes):
    hub.add("someone/stories", checkpoint(stories))
    assert fetch.fetch_model("someone/stories:q8_0", load_config(), notes).quant == "Q8_0"
    assert fetch.fetch_model("someone/stories", load_config(), notes).quant == "Q4_K_M"
    assert len(hub.gets("model.safetensors")) == 1


def test_a_broken_connection_is_resumed_where_it_broke(published, gguf, notes):
    published.cuts = [1000, 2000]
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.path.read_bytes() == gguf
    assert published.gets("tiny-Q4_K_M.gguf") == [None, "bytes=1000-", "bytes=3000-"]
    assert any("resuming" in line for line in notes.lines)


def test_a_file_behind_a_redirect_is_resumed_and_its_host_never_sees_the_token(
    hub, gguf, notes, monkeypatch
):
    repo = hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf}, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.redirects, hub.cuts = True, [1000, 2000]
    model = fetch.fetch_model(REPO, load_config(), notes)
    assert model.path.read_bytes() == gguf
    assert model.revision == repo.commit
    ranges = [None, "bytes=1000-", "bytes=3000-"]
    assert hub.gets("tiny-Q4_K_M.gguf") == ranges  # each break asks the hub for a fresh address
    assert hub.elsewhere == [("GET", asked, None) for asked in ranges]


def test_an_address_that_is_no_longer_good_is_told(hub, gguf, notes, monkeypatch):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    hub.redirects = True
    monkeypatch.setattr(hub, "signed", type("Forgets", (dict,), {"__setitem__": lambda *_: None})())
    with pytest.raises(
        UserError,
        match=f"localhost, to which the hub redirects for {REPO}, answers with status 403",
    ):
        fetch.fetch_model(REPO, load_config(), notes)


def test_a_host_of_files_that_cannot_be_reached_is_told_by_its_own_name(
    hub, gguf, notes, monkeypatch
):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    hub.redirects = True
    monkeypatch.setattr(hub, "sign", lambda *_: "http://localhost:1/blob")
    with pytest.raises(UserError, match="no connection to localhost: "):
        fetch.fetch_model(REPO, load_config(), notes)


def test_an_interrupted_download_is_resumed_by_the_next_command(published, gguf, notes):
    def stop(_):
        raise KeyboardInterrupt

    notes.on_advance = stop
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_model(REPO, load_config(), notes)
    left = list(load_config().hub_cache.glob("models--*/blobs/*.llmcli.incomplete"))
    assert len(left) == 1
    size = left[0].stat().st_size
    assert 0 < size < len(gguf)
    notes.on_advance = lambda _: None
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert published.gets("tiny-Q4_K_M.gguf")[-1] == f"bytes={size}-"
    label, total, done, steps = notes.bars[-1]
    assert (label, total, done, sum(steps)) == (REPO, len(gguf), size, len(gguf) - size)
    assert not left[0].exists()


def test_progress_never_runs_backwards_when_the_server_starts_over(published, gguf, notes):
    published.ignore_range = True
    published.cuts = [3000]
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    steps = notes.bars[0][3]
    assert min(steps) > 0
    assert sum(steps) == len(gguf)


def test_wrong_content_is_deleted_and_said(published, gguf, notes):
    published.repos[REPO].served["tiny-Q4_K_M.gguf"] = b"X" * len(gguf)
    with pytest.raises(UserError, match="does not match its digest on the hub"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert [
        path for path in load_config().hub_cache.glob("models--*/blobs/*") if path.is_file()
    ] == []
    published.repos[REPO].served.clear()
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf


def test_a_wrong_small_file_is_noticed_too(hub, stories, notes):
    hub.add("someone/stories", checkpoint(stories)).served["config.json"] = b"{}" + b" " * (
        (stories / "config.json").stat().st_size - 2
    )
    with pytest.raises(
        UserError, match=r"config\.json of someone/stories does not match its digest"
    ):
        fetch.fetch_model("someone/stories", load_config(), notes)


def test_a_damaged_blob_in_the_cache_is_replaced(published, gguf, notes):
    path = fetch.fetch_model(REPO, load_config(), notes).path
    path.resolve().write_bytes(b"X" * len(gguf))
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert any("damaged" in line for line in notes.lines)


def test_a_file_that_is_no_gguf_is_refused_and_not_listed(hub, notes):
    from llmcli.catalog import store

    hub.add(REPO, {"tiny-Q4_K_M.gguf": b"this is not a model at all" * 9})
    with pytest.raises(UserError):
        fetch.fetch_model(REPO, load_config(), notes)
    assert store.list_manifests(load_config()) == []


def test_a_revision_is_resolved_and_kept(published, gguf, notes):
    commit = published.repos[REPO].commit
    assert fetch.fetch_model(REPO, load_config(), notes, revision="main").revision == commit
    published.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "new": b""})
    assert fetch.fetch_model(REPO, load_config(), notes).revision == commit
    assert (
        fetch.fetch_model(REPO, load_config(), notes, force=True).revision
        == published.repos[REPO].commit
        != commit
    )
    assert len(published.gets("tiny-Q4_K_M.gguf")) == 1  # the same blob is not fetched again


@pytest.mark.parametrize(
    ("switch", "message", "hint"),
    [
        ({"gated": True}, "is gated", "accept them on"),
        ({"token": "secret"}, "no public model", "set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_next_step(hub, gguf, notes, switch, message, hint):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf}, **switch)
    with pytest.raises(UserError, match=message) as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert hint in raised.value.hint


def test_a_token_opens_a_private_repository(hub, gguf, notes, monkeypatch):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf}, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf


def test_a_bad_token_is_told_apart_from_a_missing_model(published, notes, monkeypatch):
    published.bad_tokens = {"old"}
    monkeypatch.setenv("HF_TOKEN", "old")
    with pytest.raises(UserError, match="rejects the token"):
        fetch.fetch_model(REPO, load_config(), notes)


def test_an_unknown_repository_and_revision_are_told(published, notes):
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
def test_a_hub_that_fails_is_told(published, notes, status, message):
    published.status = status
    with pytest.raises(UserError, match=message):
        fetch.fetch_model(REPO, load_config(), notes)


def test_no_network_is_told_with_what_to_check(notes, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"no connection to http://127.0.0.1:9") as raised:
        fetch.fetch_model(REPO, load_config(), notes)
    assert "HF_ENDPOINT" in raised.value.hint


def test_offline_makes_no_request(published, notes, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="llmcli is offline"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert published.requests == []


def test_offline_finds_what_another_program_put_into_the_cache(published, gguf, notes, monkeypatch):
    from huggingface_hub import hf_hub_download

    hf_hub_download(
        REPO,
        "tiny-Q4_K_M.gguf",
        cache_dir=load_config().hub_cache,
        endpoint=published.url,
        token=False,
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    published.requests.clear()
    assert fetch.fetch_model(REPO, load_config(), notes).path.read_bytes() == gguf
    assert published.requests == []


def test_a_full_disk_is_refused_before_the_first_byte(published, notes, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match=r"not enough disk space: .* are needed"):
        fetch.fetch_model(REPO, load_config(), notes)
    assert published.gets("tiny-Q4_K_M.gguf") == []


def test_names_that_leave_their_folder_are_ignored(hub, gguf, notes):
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
def test_a_listing_that_is_no_hubs_is_told(notes, monkeypatch, hub, answer):
    monkeypatch.setattr(
        "tests.fixtures.fake_hub._Handler.answer", lambda self: self.reply(200, answer.encode(), {})
    )
    with pytest.raises(UserError, match=r"does not answer like a hub|gives no valid (size|commit)"):
        fetch.fetch_model(REPO, load_config(), notes)


def test_a_page_that_is_no_hub_is_told(notes, monkeypatch, hub):
    monkeypatch.setattr(
        "tests.fixtures.fake_hub._Handler.answer",
        lambda self: self.reply(200, b"<html>welcome</html>", {}),
    )
    with pytest.raises(UserError, match="does not answer like a hub"):
        fetch.fetch_model(REPO, load_config(), notes)
