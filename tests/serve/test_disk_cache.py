"""Real servers with `--cache-dir`: killed, two at once, and with damaged files."""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_disk_tokens import serve_cached

ROOT = Path(__file__).parents[2]
PROMPTS = [f"{number} " + "once upon a time there was a little girl. " * 12 for number in range(4)]


@contextmanager
def serve(model: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `llmcli serve`, and yield the process and its address."""
    words = [sys.executable, "-m", "llmcli.app", "serve", str(model), "--port", "0", "--json"]
    words += ["-t", "1", "-np", "2", "-c", "1024", "-fa", "on", "--cache-dir", str(folder), *flags]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON response to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def ask(url: str, prompt: str) -> tuple[str, dict[str, int]]:
    """Return an answer, and how many tokens of the prompt were not computed."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
    response = fetch(f"{url}/v1/completions", body)
    return response["choices"][0]["text"], {
        "prompt": response["usage"]["prompt_tokens"],
        "disk": 0,
        "cached": 0,
        **{
            name.removesuffix("_tokens"): count
            for name, count in response["usage"]["prompt_tokens_details"].items()
        },
    }


def wait_until_written(url: str) -> None:
    """Return when no state waits to be written."""
    while True:
        disk = fetch(f"{url}/v1/kv")["disk"]
        if disk["written_bytes"] and not disk["queued_bytes"]:
            return


def test_answers_before_a_kill_are_found_after_it(stories_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with serve(stories_gguf, folder) as (process, url):
        texts = [ask(url, prompt)[0] for prompt in PROMPTS]
        wait_until_written(url)
        body = {"prompt": "x", "max_tokens": 800, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data:")
            process.kill()  # while it answers
            process.wait()
    with serve(stories_gguf, folder) as (process, url):
        for prompt, text in zip(PROMPTS, texts, strict=True):
            again, counts = ask(url, prompt)
            assert again == text
            assert counts["cached"] >= counts["prompt"] - 16  # the full blocks
            assert counts["disk"] >= 128
        report = fetch(f"{url}/v1/kv?check=true")
        assert report["checked"]
        assert report["disk"]["read_tokens"] > 3 * counts["disk"]
        with urllib.request.urlopen(f"{url}/metrics") as response:
            metrics = response.read().decode()
        assert f"llmcli_prompt_tokens_disk_total {report['disk']['read_tokens']}\n" in metrics
        process.terminate()
        assert process.wait(30) == 0


def test_two_servers_fill_one_folder_at_once(stories_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with (
        serve(stories_gguf, folder) as (left, first),
        serve(stories_gguf, folder) as (right, second),
    ):

        def play(url: str, found: list[str]) -> None:
            for prompt in PROMPTS * 2:
                found.append(ask(url, prompt)[0])

        found: list[list[str]] = [[], []]
        threads = [
            threading.Thread(target=play, args=arguments)
            for arguments in zip((first, second), found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] == found[1]
        assert len(found[0]) == 8
        for url in (first, second):
            disk = fetch(f"{url}/v1/kv?check=true")["disk"]
            assert (disk["damaged"], disk["failed"]) == (0, 0)
        for process in (left, right):  # a killed server may leave the file that it was writing
            process.terminate()
            assert process.wait(30) == 0
    assert not list(folder.glob("*/.*.part"))


def test_a_stopping_server_writes_what_it_has(stories_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with serve(stories_gguf, folder) as (process, url):
        ask(url, PROMPTS[0])
        process.terminate()
        assert process.wait(30) == 0
    assert len(list(folder.glob("*/*.kv"))) >= 1


def test_a_damaged_folder_is_told_once(stories_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with serve(stories_gguf, folder) as (process, url):
        text, _ = ask(url, PROMPTS[0])
        ask(url, PROMPTS[1])
        process.terminate()
        process.wait(30)
    for path in folder.glob("*/*.kv"):
        path.write_bytes(path.read_bytes()[:-1])
    with serve(stories_gguf, folder) as (process, url):
        again, counts = ask(url, PROMPTS[0])
        assert (again, counts["disk"]) == (text, 0)
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        assert process.stderr.read().count("a saved state is not used") == 1


def test_a_server_answers_others_while_a_state_is_read(
    stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_cached(stories_gguf, tmp_path) as served:
        text, _ = ask(served.url, PROMPTS[0])
    with serve_cached(stories_gguf, tmp_path) as served:
        cache = served.bridge.runner.engine.scheduler.disk_cache
        assert cache is not None
        has_begun, is_released, read = threading.Event(), threading.Event(), cache.folder.read

        def wait(name: str, n_vocab: int) -> Any:
            has_begun.set()
            assert is_released.wait(60)
            return read(name, n_vocab)

        monkeypatch.setattr(cache.folder, "read", wait)
        found: list[tuple[str, dict[str, int]]] = []
        reader = threading.Thread(target=lambda: found.append(ask(served.url, PROMPTS[0])))
        reader.start()
        assert has_begun.wait(60)
        assert ask(served.url, "so")[1]["disk"] == 0
        assert served.bridge.n_open == 1, "the first request still waits"
        is_released.set()
        reader.join(60)
        (again, counts) = found[0]
        assert again == text
        assert counts["disk"] >= 128
