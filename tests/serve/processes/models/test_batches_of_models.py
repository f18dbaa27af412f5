"""Batches whose lines name different models: with processes that load nothing, and with a real
server that is killed.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from llmcli.api.errors import ApiError, ServerStopping
from llmcli.api.server_settings import ServerSettings
from llmcli.batch.request_line import BatchRequest
from llmcli.config import load_config
from llmcli.serve.batches.records import StoredBatch
from llmcli.serve.http.api_keys import owner_id
from llmcli.serve.http.exchange import BACKGROUND_KEY
from llmcli.serve.processes.front import UpstreamLost
from llmcli.serve.processes.models import pooled_lines, pooled_model
from llmcli.serve.processes.models.pooled_lines import PooledLines
from tests.fixtures.batches import create, make_line, read_rows, wait
from tests.serve.processes.models.fake_processes import MIB, World, run
from tests.serve.processes.models.test_several_models import KEY, SECONDS, serving, table

__all__ = ["table"]  # a fixture
COMPLETIONS = "/v1/completions"
KEYS = ("first-key", "second-key")


def open_lines(world: World, owner: str = "", keys: tuple[str, ...] = KEYS) -> Any:
    settings = ServerSettings(("a",), keys=keys)
    batch = StoredBatch("batch_1", COMPLETIONS, "file_1", "24h", 0, 1, owner)
    return PooledLines(world.pool, settings).open(batch, {"batch": 1})


def line(name: str, **body: Any) -> BatchRequest:
    return BatchRequest(name, COMPLETIONS, {"prompt": "x", **body})


def test_each_line_goes_to_its_model_for_its_client(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any], Any]] = []

    def answer(name: str, scope: Any, body: bytes) -> tuple[int, bytes]:
        asked.append((name, json.loads(body), scope))
        return 200, json.dumps({"model": name}).encode()

    async def scenario(world: World) -> None:
        world.answer = answer
        lines = open_lines(world, owner_id({"x-api-key": KEYS[1]}, KEYS))
        names = ["a", "b"] * 4
        requests = [lines.answer(line(f"{n}", model=name), "") for n, name in enumerate(names)]
        found = await asyncio.gather(*requests)
        assert [document["model"] for document in found] == names
        assert world.loads == ["a", "b"]  # the lines of a model are answered together
        for _, body, scope in asked:
            assert (b"authorization", b"Bearer second-key") in scope["headers"]
            assert scope[BACKGROUND_KEY]
            assert body["seed"] >= 0
        seeds = {body["seed"] for _, body, _ in asked}
        assert len(seeds) == len(names)
        await lines.answer(line("0", model="a"), "")
        assert asked[-1][1]["seed"] in seeds  # that of the line, also after a restart
        await lines.answer(line("0", model="a", seed=7), "")
        assert asked[-1][1]["seed"] == 7

    run(scenario, tmp_path, {"a": 600 * MIB, "b": 700 * MIB})


def test_errors_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_lines, "BUSY_SECONDS", 0)
    monkeypatch.setattr(pooled_model, "RETRY_DELAYS_SECONDS", (0.0,))
    fields = {"param": "max_tokens", "code": "x", "type": "special", "hint": "use less"}
    refusal = {"error": {"message": "max_tokens is wrong", **fields}}
    answers = [
        (429, b'{"error": {"message": "busy"}}'),
        (200, b'{"model": "a"}'),
        (400, json.dumps(refusal).encode()),
    ]

    async def scenario(world: World) -> None:
        world.answer = lambda _name, _scope, _body: answers.pop(0)
        lines = open_lines(world, keys=())
        assert await lines.answer(line("1", model="a"), "") == {"model": "a"}
        with pytest.raises(ApiError, match="max_tokens is wrong") as error:
            await lines.answer(line("2", model="a"), "")
        assert (error.value.status, error.value.param) == (400, "max_tokens")
        assert (error.value.type, error.value.more) == ("special", {"hint": "use less"})
        with pytest.raises(ApiError, match="there is no model 'c'") as error:
            await lines.answer(line("3", model="c"), "")
        assert error.value.status == 404
        with pytest.raises(ApiError, match="cannot stream"):
            await lines.answer(line("4", model="a", stream=True), "")

        async def lose(*_: Any) -> Any:
            raise UpstreamLost
            yield

        monkeypatch.setattr(world.pool, "ask", lose)
        with pytest.raises(ApiError, match="the model was lost 3 times"):
            await lines.answer(line("5", model="a"), "")
        monkeypatch.undo()
        world.pool.stop()
        with pytest.raises(ServerStopping):
            await lines.answer(line("6", model="b"), "")

    run(scenario, tmp_path, {"a": MIB, "b": MIB})


def test_lines_wait_for_a_model_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_lines, "WAIT_SECONDS", 0)
    monkeypatch.setattr(pooled_model, "RETRY_DELAYS_SECONDS", (0.0,))
    refused = (503, b'{"error": {"message": "tried again in 15 s", "code": "model_unavailable"}}')
    good = (200, b'{"model": "a"}')
    answers: list[tuple[int, bytes]] = []

    async def scenario(world: World) -> None:
        world.answer = lambda _name, _scope, _body: answers.pop(0)
        lines = open_lines(world, keys=())
        answers[:] = [refused] * pooled_lines.MAX_WAITS + [good]
        assert await lines.answer(line("1", model="a"), "") == {"model": "a"}
        answers[:] = [refused] * (pooled_lines.MAX_WAITS + 2) + [good]
        for number in range(2):  # the second does not wait again
            with pytest.raises(ApiError, match="tried again in 15 s"):
                await lines.answer(line(f"2 {number}", model="a"), "")
        assert answers == [good]
        answers[:] = [good, refused, good]  # it is available again
        for number in range(2):
            assert await lines.answer(line(f"3 {number}", model="a"), "") == {"model": "a"}
        assert answers == []

    run(scenario, tmp_path, {"a": MIB})


def test_a_batch_whose_key_was_removed_runs_under_no_other(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.answer = lambda name, _scope, _body: (200, b'{"model": "a"}')
        for owner in ("", owner_id({"x-api-key": "removed-key"}, KEYS)):
            with pytest.raises(ApiError, match="does not take the key") as error:
                await open_lines(world, owner).answer(line("1", model="a"), "")
            assert error.value.status == 401
        assert world.loads == []
        assert await open_lines(world, keys=()).answer(line("1", model="a"), "") == {"model": "a"}

    run(scenario, tmp_path, {"a": MIB})


def rows() -> list[dict[str, Any]]:
    return [
        make_line(
            f"row {number}",
            COMPLETIONS,
            {
                "model": ("one:260k", "two:260k")[number % 2],
                "prompt": f"Once {number}",
                "max_tokens": 8 if number < 20 else 200,
                "temperature": 0,
            },
        )
        for number in range(24)
    ]


def late_row() -> dict[str, Any]:
    """A line whose model is not there yet, so that it waits."""
    return make_line("late", COMPLETIONS, {"model": "late:260k", "prompt": "Once", "max_tokens": 8})


def texts(api: OpenAI, file_id: str | None) -> dict[str, str]:
    return {
        row["custom_id"]: row["response"]["body"]["choices"][0]["text"]
        for row in read_rows(api, file_id)
    }


def test_a_killed_server_goes_on_with_the_lines_of_two_models(
    table: dict[str, Path], tmp_path: Path
) -> None:
    def count_records(batch_id: str) -> int:
        journal = tmp_path / "files" / f".{batch_id}.jsonl.journal"
        return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0

    late = tmp_path / "late.gguf"  # its line cannot be answered before the server is killed
    with load_config().user_catalog.open("a") as catalog:
        catalog.write(f'[serve."late:260k"]\nref = "{late}"\n')
    words = ("--memory-limit", "600M", "--files-folder")  # for both, so that few are loaded
    with (
        serving(*words, str(tmp_path / "files"), is_killed=True) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as api,
    ):
        unknown = make_line("unknown", COMPLETIONS, {"model": "three", "prompt": "x"})
        batch = create(api, late_row(), *rows(), unknown, endpoint=COMPLETIONS)
        deadline = time.monotonic() + SECONDS
        while count_records(batch.id) < 4:
            assert time.monotonic() < deadline
            status = api.batches.retrieve(batch.id).status
            assert status in ("validating", "in_progress")
            time.sleep(0.02)
    assert 4 <= count_records(batch.id) <= len(rows()) + 1
    late.write_bytes(table["one"].read_bytes())
    with (
        serving(*words, str(tmp_path / "files")) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as api,
    ):
        batch = wait(api, api.batches.retrieve(batch.id))
        assert (batch.status, batch.model) == ("completed", None)
        found = texts(api, batch.output_file_id)
        assert list(found) == ["late", *(row["custom_id"] for row in rows())]
        (error,) = read_rows(api, batch.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("unknown", 404)
        # rounding differs between passes of several answers, which changes only long texts
        body = rows()[0]["body"]
        assert found["row 0"] == api.completions.create(**body).choices[0].text
