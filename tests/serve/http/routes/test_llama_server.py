"""llama-server's /props, /apply-template and /slots: requests that name a slot, and saving, restoring
and erasing what is cached in one.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.serve.engine_thread import slot_files
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import CHAT, Served, serving

FRANCE = "Once upon a time there was a cat in France. It liked to play"
GERMANY = "Once upon a time there was a cat in Germany. It liked to play"


@pytest.fixture
def served(stories_runner: Runner, tmp_path: Path) -> Iterator[Served]:
    with serving(stories_runner, slot_folder=tmp_path) as running:
        stories_runner.engine.ledger.evict_idle()
        yield running


def complete(served: Served, prompt: str, slot: int = -1, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 8, "id_slot": slot, "ignore_eos": True, **more}
    answer = httpx.post(f"{served.url}/completion", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def act(served: Served, slot: object, action: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/slots/{slot}?action={action}", json=body, timeout=60)


def test_a_slot_is_saved_and_restored_as_in_llama_server(served: Served, tmp_path: Path) -> None:
    first = complete(served, FRANCE, 1)
    n_prompt = first["timings"]["prompt_n"]
    assert first["id_slot"] == 1
    assert first["timings"]["cache_n"] == 0
    saved = act(served, 1, "save", filename="slot1.bin").json()
    assert saved["n_saved"] == n_prompt + 8 - 1
    assert saved["n_written"] == (tmp_path / "slot1.bin").stat().st_size
    assert (saved["id_slot"], saved["filename"]) == (1, "slot1.bin")
    assert saved["timings"]["save_ms"] > 0
    assert (tmp_path / "slot1.bin").stat().st_mode & 0o777 == 0o600
    # only what differs is computed
    second = complete(served, GERMANY, 1)
    n_different = second["timings"]["prompt_n"]
    assert 0 < n_different < n_prompt
    restored = act(served, 0, "restore", filename="slot1.bin").json()
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] == saved["n_written"]
    third = complete(served, GERMANY, 0)
    assert third["timings"]["prompt_n"] == n_different
    assert third["content"] == second["content"]
    # the other slot is as it was
    assert complete(served, GERMANY, 1)["timings"]["prompt_n"] == 1


def test_a_restored_slot_continues_after_a_restart(
    served: Served, stories_gguf: Path, tmp_path: Path
) -> None:
    expected = complete(served, FRANCE, 2)["content"]
    assert act(served, 2, "save", filename="a").status_code == 200
    options = RunOptions(ctx_size=512, threads=1, threads_batch=1, gemm="ggml")
    with open_runner(stories_gguf, options, template=CHAT, slots=8, placement=ON_HOST) as runner:
        with serving(runner, slot_folder=tmp_path) as second:
            assert act(second, 5, "restore", filename="a").json()["n_restored"] > 0
            # also without a slot in the request
            found = complete(second, FRANCE)
            assert (found["timings"]["prompt_n"], found["content"]) == (1, expected)


def test_an_erased_slot_is_computed_again(served: Served) -> None:
    n_prompt = complete(served, FRANCE, 3)["timings"]["prompt_n"]
    assert complete(served, FRANCE, 3)["timings"]["prompt_n"] == 1
    assert act(served, 3, "erase").json() == {"id_slot": 3, "n_erased": n_prompt + 7}
    assert complete(served, FRANCE, 3)["timings"]["prompt_n"] == n_prompt
    assert act(served, 4, "erase").json() == {"id_slot": 4, "n_erased": 0}


def test_a_slot_whose_cells_were_offloaded_is_saved_and_continued(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.bridge.runner.engine
    before = engine.schedule
    engine.schedule = replace(before, idle_offload="always", host_bytes=1 << 29)
    try:
        n_prompt = complete(served, FRANCE, 1)["timings"]["prompt_n"]
        complete(served, "A dog ran to the park", 2)
        assert not engine.ledger.tokens[1] and len(engine.scheduler.idle_offload)
        assert act(served, 1, "save", filename="x").json()["n_saved"] == n_prompt + 7
        complete(served, "A bird flew to the tree", 2)
        assert not engine.ledger.tokens[1]
        assert complete(served, FRANCE, 1)["timings"]["prompt_n"] == 1
        complete(served, "A fish swam in the sea", 2)
        assert act(served, 1, "erase").json()["n_erased"] == n_prompt + 7
        assert complete(served, FRANCE, 1)["timings"]["prompt_n"] == n_prompt
    finally:
        engine.schedule = before
        engine.ledger.evict_idle()


def test_several_answers_of_a_request_with_a_slot(served: Served) -> None:
    body = {"prompt": FRANCE, "n": 3, "max_tokens": 5, "id_slot": 0, "ignore_eos": True}
    for _ in range(2):
        found = httpx.post(f"{served.v1}/completions", json=body, timeout=60).json()
        assert len(found["choices"]) == 3


def test_slots_are_listed(served: Served) -> None:
    complete(served, FRANCE, 1)
    slots = httpx.get(f"{served.url}/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert [slot["n_prompt_tokens"] > 0 for slot in slots] == [False, True, False, False]
    assert not any(slot["is_processing"] for slot in slots)
    assert slots[0]["n_ctx"] == 512
    complete(served, FRANCE, 6)
    assert len(httpx.get(f"{served.url}/slots").json()) == 7


@pytest.mark.parametrize(
    ("slot", "action", "body", "message"),
    [
        (0, "copy", {}, "action must be one of save, restore, erase"),
        ("x", "save", {"filename": "a"}, "'x' is no slot"),
        (8, "erase", {}, "there is no slot 8; the last one is 7"),
        (0, "save", {}, "filename is missing"),
        (7, "save", {"filename": "a"}, "slot 7 is empty"),
        (0, "save", {"filename": "../a"}, "filename must be"),
        (0, "save", {"filename": "a/b"}, "filename must be"),
        (0, "save", {"filename": ".hidden"}, "filename must be"),
        (0, "save", {"filename": "a\nb"}, "filename must be"),
        (0, "save", {"filename": "x" * 201}, "filename must be"),
        (0, "restore", {"filename": "missing"}, "there is no saved slot 'missing'"),
        (0, "restore", {"filename": "damaged"}, "damaged cannot be restored: it is damaged"),
    ],
)
def test_wrong_actions_are_refused(
    served: Served, tmp_path: Path, slot: object, action: str, body: dict[str, Any], message: str
) -> None:
    (tmp_path / "damaged").write_bytes(b"x" * 100)
    answer = act(served, slot, action, **body)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), (
        answer.text
    )


def test_a_damaged_file_leaves_the_slot_as_it_was(served: Served, tmp_path: Path) -> None:
    complete(served, FRANCE, 0)
    act(served, 0, "save", filename="a")
    raw = bytearray((tmp_path / "a").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a").write_bytes(raw)
    answer = act(served, 0, "restore", filename="a")
    assert answer.status_code == 400 and "have changed" in answer.text
    assert complete(served, FRANCE, 0)["timings"]["prompt_n"] == 1


def test_without_a_folder_nothing_is_saved(stories_runner: Runner) -> None:
    with serving(stories_runner) as plain:
        answer = act(plain, 0, "save", filename="a")
    assert (answer.status_code, "--slot-save-path" in answer.text) == (501, True)


def test_a_slot_that_does_not_exist_cannot_be_named(served: Served) -> None:
    body = {"prompt": "a", "id_slot": 8}
    answer = httpx.post(f"{served.url}/completion", json=body)
    assert answer.status_code == 400 and "id_slot must be" in answer.text


def test_requests_for_one_slot_wait_for_each_other(served: Served) -> None:
    """The second request of a slot waits, although other slots are idle."""
    found: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: found.append(complete(served, FRANCE, 2, n_predict=40)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {answer["id_slot"] for answer in found} == {2}
    assert len({answer["content"] for answer in found}) == 1


def test_clients_that_share_no_cache_do_not_share_slots(stories_runner: Runner) -> None:
    engine = stories_runner.engine
    before = engine.schedule
    engine.ledger.evict_idle()
    engine.schedule = replace(before, share_prefixes=False)
    keys = ("key-of-one", "key-of-other")
    try:
        with serving(stories_runner, keys=keys) as private:
            counts = []
            for key in (*keys, keys[1]):
                answer = httpx.post(
                    f"{private.url}/completion",
                    json={"prompt": FRANCE, "n_predict": 4, "id_slot": 0},
                    headers={"authorization": f"Bearer {key}"},
                )
                counts.append(answer.json()["timings"]["prompt_n"])
        assert counts[0] == counts[1] > counts[2] == 1
    finally:
        engine.schedule = before
        engine.ledger.evict_idle()


def test_a_busy_slot_is_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_files, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(served.bridge.runner.engine.ledger, "is_busy", lambda slot: True)
    answer = act(served, 0, "erase")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")


def test_props_slots_and_apply_template(serve: Callable[..., Served]) -> None:
    served = serve(b"hi", parallel=3)
    with client(served) as api:
        api.chat.completions.create(model="tiny", messages=HELLO)
    props = httpx.get(f"{served.url}/props").json()
    assert (props["total_slots"], props["model_alias"]) == (3, "tiny")
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 0
    assert props["chat_template"].startswith("{% for m in messages %}")
    slots = httpx.get(f"{served.url}/slots").json()
    assert [(slot["id"], slot["n_ctx"]) for slot in slots] == [(0, 512), (1, 512), (2, 512)]
    assert sum(slot["n_prompt_tokens"] > 0 for slot in slots) == 1
    assert not any(slot["is_processing"] for slot in slots)
    prompt = httpx.post(f"{served.url}/apply-template", json={"messages": HELLO}).json()["prompt"]
    assert prompt.endswith("<user>Once upon a time\n<assistant>")


def test_a_template_is_applied_to_a_conversation_longer_than_the_context(
    serve: Callable[..., Served],
) -> None:
    served = serve(n_ctx=64)
    body = {"messages": [{"role": "user", "content": "x" * 1000}]}
    response = httpx.post(f"{served.url}/apply-template", json=body)
    assert response.status_code == 200
    assert response.json()["prompt"].count("x") == 1000
    for body, message in (
        ({}, "messages is missing"),
        ({"messages": [{"role": "cat", "content": ""}]}, "messages[0].role"),
    ):
        response = httpx.post(f"{served.url}/apply-template", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    base = serve(template=None)
    response = httpx.post(f"{base.url}/apply-template", json={"messages": HELLO})
    assert "base model" in response.json()["error"]["message"]


@pytest.mark.parametrize("writes_bos", [True, False])
def test_an_applied_template_has_the_tokens_of_a_chat_when_it_is_completed(
    stories_gguf: Path, writes_bos: bool
) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    source = "{{ bos_token }}" * writes_bos + source
    options = RunOptions(ctx_size=128, threads=1, threads_batch=1, gemm="ggml")
    with (
        open_runner(stories_gguf, options, template=source, placement=ON_HOST) as runner,
        serving(runner, 1, 4) as served,
    ):
        body = {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 1}
        chat = httpx.post(f"{served.v1}/chat/completions", json=body).json()
        prompt = httpx.post(f"{served.url}/apply-template", json=body).json()["prompt"]
        assert not prompt.startswith("<s>")
        answer = httpx.post(
            f"{served.url}/completion", json={"prompt": prompt, "n_predict": 1}
        ).json()
        assert answer["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
        assert answer["content"] == chat["choices"][0]["message"]["content"]
