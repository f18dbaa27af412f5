"""A real `llmcli serve` with two small models under a memory limit for one."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from llmcli.config import load_config
from tests.fixtures.cli import Done

ROOT = Path(__file__).parents[4]
KEY = "a-key-that-is-long"
LIMIT = "330M"  # one model needs about 190 MB, nearly all of it the interpreter
SECONDS = 120.0  # a process starts in seconds, but tests may run beside each other


class Server:
    """A running server, with what it has printed."""

    def __init__(self, process: "subprocess.Popen[str]", ready: dict[str, Any]) -> None:
        self.process, self.ready, url = process, ready, ready["url"]
        self.url = url
        self.api = httpx.Client(
            base_url=url, timeout=SECONDS, headers={"authorization": f"Bearer {KEY}"}
        )

    def text(self, model: str, **fields: Any) -> str:
        """Return a completion."""
        body = {"model": model, "prompt": "Once upon", "max_tokens": 12, "temperature": 0, **fields}
        response = self.api.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def models(self) -> dict[str, dict[str, Any]]:
        return {model["id"]: model for model in self.api.get("/v1/models").json()["data"]}

    def model_processes(self) -> list[psutil.Process]:
        pids = [model["pid"] for model in self.models().values() if model["pid"]]
        return [psutil.Process(pid) for pid in pids]


@contextmanager
def serving(*words: str, is_killed: bool = False) -> Iterator[Server]:
    """Run `llmcli serve` with these words until the end of the block, and let it stop itself, or
    kill it.
    """
    flags = ["--port", "0", "--json", "-t", "1", "-np", "2", "-c", "512", "--temp", "0"]
    command = [sys.executable, "-m", "llmcli.app", "serve", *flags, "--api-key", KEY, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            server = Server(process, ready)
            with server.api:
                yield server
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
            assert process.wait(SECONDS) == (-signal.SIGKILL if is_killed else 0)
            _gone, alive = psutil.wait_procs(children, SECONDS)
            assert alive == []
        finally:
            process.kill()


@pytest.fixture
def table(stories_gguf: Path, tmp_path: Path) -> dict[str, Path]:
    """The files of two models that [serve] names."""
    files = {name: tmp_path / f"{name}.gguf" for name in ("one", "two")}
    for path in files.values():
        path.write_bytes(stories_gguf.read_bytes())
    catalog = load_config().user_catalog
    catalog.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'[serve."{name}:260k"]\nref = "{path}"\n' for name, path in files.items()]
    catalog.write_text(lines[0] + 'aliases = ["first"]\n' + lines[1] + "ctx_size = 256\n")
    return files


def test_two_models_under_a_limit_for_one(
    table: dict[str, Path], llmcli: Callable[..., Done]
) -> None:
    with serving("--memory-limit", LIMIT) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "one", "prompt": "x"})
        assert refused.status_code == 401
        assert httpx.get(f"{server.url}/health").json()["loaded"] == 0
        assert {name: model["state"] for name, model in server.models().items()} == {
            "one:260k": "here",
            "two:260k": "here",
        }
        with ThreadPoolExecutor(6) as pool:
            texts = list(pool.map(server.text, ["one:260k", "two:260k", "first"] * 2))
        assert len(set(texts)) == 1
        assert texts[0]
        memory = server.api.get("/v1/kv").json()
        assert 0 < memory["reserved_bytes"] <= memory["limit_bytes"] == 330_000_000
        loaded = {name: model for name, model in memory["models"].items() if model["cache"]}
        (name,) = loaded
        assert loaded[name]["planned"]["needed_bytes"] <= loaded[name]["bytes"]
        metrics = server.api.get("/metrics").text
        assert f'llmcli_model_loaded{{model="{name}"}} 1' in metrics
        assert f'llmcli_kv_cells{{model="{name}"}}' in metrics
        (process,) = server.model_processes()
        assert process.memory_info().rss <= loaded[name]["bytes"]

        # a stream of the model that is lost goes on in a new process
        process.send_signal(signal.SIGKILL)
        assert server.text(name) == texts[0]
        assert server.models()[name]["crashes"] == 1

        done = llmcli("ps", server.url, "--api-key", KEY, "--json")
        rows = {row["model"]: row for row in json.loads(done.out)["models"]}
        assert rows[name]["state"] == "loaded"
        assert rows[name]["kv_bytes"] > 0
        table_text = llmcli("ps", server.url, "--api-key", KEY).out
        assert "one:260k" in table_text
        assert "of 314.7 MiB are taken" in table_text

        assert server.api.post("/models/unload", json={"model": name}).json()["was_loaded"]
        assert server.models()[name]["state"] == "here"
        assert server.model_processes() == []
        loading = server.api.post("/models/load", json={"model": "first"}).json()
        assert loading == {"success": True, "model": "one:260k", "state": "loaded"}
        assert server.models()["one:260k"]["status"]["value"] == "loaded"
        assert server.models()["two:260k"]["meta"]["n_ctx"] == 256

        running = server.api.get("/api/ps").json()["models"]
        assert [model["name"] for model in running] == ["one:260k"]
        stop = {"model": "one:260k", "keep_alive": 0}
        assert server.api.post("/api/generate", json=stop).json()["done_reason"] == "unload"
        assert server.api.get("/api/ps").json()["models"] == []
        tags = server.api.get("/api/tags").json()["models"]
        assert [tag["name"] for tag in tags] == ["one:260k", "two:260k"]

        table["two"].unlink()
        gone = server.api.post("/v1/completions", json={"model": "two", "prompt": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "model_unavailable")
        assert "is not on this disk" in gone.json()["error"]["message"]
        for path in ("/v1/files", "/api/delete"):  # it has no folder for files
            assert server.api.post(path, json={"model": "one"}).status_code == 501
        assert server.api.post("/no/such/path", json={"model": "one"}).status_code == 404
        assert server.models()["one:260k"]["state"] == "here"  # refusals load nothing


def test_a_model_that_cannot_fit_is_told_before_its_weights_are_read(
    table: dict[str, Path],
) -> None:
    with serving("--memory-limit", "280M", "--ctx-size", "524288") as server:
        response = server.api.post("/v1/completions", json={"model": "one", "prompt": "x"})
        assert response.status_code == 503
        error = response.json()["error"]
        assert error["code"] == "model_unavailable"
        assert "-c " in error["hint"] or "--memory-limit" in error["hint"]
        health = server.api.get("/health").json()
        assert health["loaded"] == 0
        assert server.model_processes() == []


def test_ps_of_a_server_that_is_not_there(llmcli: Callable[..., Done]) -> None:
    done = llmcli("ps", "http://127.0.0.1:1")
    assert done.code == 1
    assert "does not answer" in done.err
    assert "hint: llmcli serve starts a server" in done.err
    assert llmcli("ps", "ftp://x").code == 2


def test_a_wrong_table_is_an_error_with_its_line(llmcli: Callable[..., Done]) -> None:
    catalog = load_config().user_catalog
    catalog.parent.mkdir(parents=True, exist_ok=True)
    for line, message in (
        ('kepp_alive = "5m"', "unknown key"),
        ('keep_alive = "soon"', "is no duration"),
        ("parallel = 0", "must be a number from 1 to 128"),
        ("pin = 1", "`pin` must be true or false"),
        ('aliases = ["a b"]', "`aliases` must be names"),
    ):
        catalog.write_text(f'[serve."x"]\n{line}\n')
        done = llmcli("serve", "--port", "0")
        assert done.code == 1
        assert message in done.err
        assert "line 1" in done.err
    catalog.write_text('[serve."x"]\nref = "/none"\naliases = ["y"]\n[serve."Y"]\nref = "/none"\n')
    assert "is a name of both" in llmcli("serve", "--port", "0").err
