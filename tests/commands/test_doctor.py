"""`llmcli doctor`: the document, the warnings with their commands, and no network access by
default.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmcli.bench.cost import memory_bandwidth
from llmcli.errors import UserError
from llmcli.hardware import cpu_features, diagnostics, host
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at rest, whose memory is not really read."""
    reading = memory_bandwidth.BandwidthReading(1 << 28, 2, (2e10, 3e10))
    monkeypatch.setattr(memory_bandwidth, "measure_bandwidth", lambda *sizes, **more: reading)
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def document(done: Done) -> Any:
    return json.loads(done.out)


def test_the_document(llmcli: Llmcli, home: Path) -> None:
    place = home / "data" / "models" / "one"
    place.mkdir(parents=True)
    (place / "a.gguf").write_bytes(bytes(1000))
    (place / "b.gguf").symlink_to(place / "a.gguf")
    done = llmcli("doctor", "--json")
    assert done.code == 0
    told = document(done)
    parts = (
        "versions",
        "cpu",
        "backends",
        "devices",
        "memory",
        "folders",
        "network",
        "workers",
        "warnings",
        "ray",
    )
    assert tuple(told) == parts
    assert told["versions"]["llmcli"]
    assert told["versions"]["llama-cpp-python"]
    assert told["cpu"]["missing"] == []
    assert "CPU" in told["backends"]
    assert "cpu" in [one["kind"] for one in told["devices"]]
    assert told["network"] is None
    assert told["workers"] is None
    assert told["ray"] is None
    assert told["memory"]["read_bandwidth_bytes_per_second"] in (3e10, None)
    folders = {one["what"]: one for one in told["folders"]}
    assert (folders["models"]["bytes"], folders["models"]["files"]) == (1000, 1)
    assert folders["llama.cpp builds"]["path"] == str(home / "cache" / "wheels")
    assert folders["conversations and profiles"]["bytes"] == 0


def test_people_get_words(llmcli: Llmcli) -> None:
    out = llmcli("doctor").out
    for words in ("processor: ", "llama.cpp uses: ", "memory: ", "stored files", "device CPU"):
        assert words in out


def test_a_build_without_avx2_is_told_with_the_rebuild_command(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu_features,
        "build_features",
        lambda: cpu_features.parse_system_info("CPU : SSE3 = 1 | AVX = 1 | "),
    )
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: frozenset({"pni", "avx", "avx2", "fma"}))
    done = llmcli("doctor")
    assert done.code == 0
    assert "this processor supports AVX2, FMA, but llama.cpp was built without" in done.err
    assert "hint: CMAKE_ARGS='' scripts/setup --again" in done.err
    assert document(llmcli("doctor", "--json"))["cpu"]["unused"] == ["AVX2", "FMA"]
    monkeypatch.setattr(diagnostics, "SETUP_SCRIPT", Path("nowhere"))
    assert "-m pip install --force-reinstall" in llmcli("doctor").err


def test_a_build_for_another_processor_is_told(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: frozenset({"pni"}))
    monkeypatch.setattr(
        cpu_features,
        "build_features",
        lambda: cpu_features.parse_system_info("CPU : SSE3 = 1 | AVX512 = 1 | "),
    )
    assert "AVX512, which this processor does not support" in llmcli("doctor").err


def test_a_library_that_does_not_load_is_told_and_the_rest_goes_on(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise UserError("llama.cpp's library does not load: libgomp.so.1", hint="install it")

    monkeypatch.setattr(cpu_features, "build_features", broken)
    done = llmcli("doctor", "--json")
    assert done.code == 1
    assert "libgomp" in document(done)["warnings"][0]["what"]
    assert "libgomp" in done.err
    assert document(done)["devices"] == []
    assert "unknown" in llmcli("doctor").out


def test_a_busy_machine_is_told(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(host, "core_count", lambda: 4)
    done = llmcli("doctor")
    assert "3.0 programs ran in the last minute on 4 cores" in done.err
    assert "-t 1 leaves cores to the other programs" in done.err


def test_without_proc_and_with_little_memory_figures_are_unknown(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("available_memory", "total_memory", "last_cache_bytes"):
        monkeypatch.setattr(host, name, lambda: None)
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: None)
    told = document(llmcli("doctor", "--json"))
    assert (
        told["memory"]["available_bytes"]
        is told["memory"]["read_bandwidth_bytes_per_second"]
        is None
    )
    assert all(one["cpu"] is None for one in told["cpu"]["features"].values())
    assert told["cpu"]["unused"] == []
    assert "memory: unknown of unknown" in llmcli("doctor").out


class _Server(BaseHTTPRequestHandler):
    """The hub and a package index at once, on loopback."""

    status = 200

    def do_HEAD(self) -> None:
        self.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(self.status)
        self.end_headers()

    def do_GET(self) -> None:
        self.asked.append(self.path)  # type: ignore[attr-defined]
        page = b'<a href="llama_cpp_python-0.3.36.tar.gz">llama_cpp_python-0.3.36.tar.gz</a>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Server]]:
    handler = type("Handler", (_Server,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{served.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("PIP_INDEX_URL", url + "/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        for name in (
            "PIP_EXTRA_INDEX_URL",
            "PIP_PROXY",
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
            "all_proxy",
        ):
            monkeypatch.delenv(name, raising=False)
        yield handler
        served.shutdown()
        thread.join()


def test_the_network_is_asked_on_request_only(llmcli: Llmcli, server: type[_Server]) -> None:
    asked = server.asked  # type: ignore[attr-defined]
    assert document(llmcli("doctor", "--json"))["network"] is None
    assert asked == []
    told = document(llmcli("doctor", "--network", "--json"))["network"]
    assert [one["reachable"] for one in told] == [True, True], told
    assert any(path.startswith("/api/") for path in asked)
    assert any(path.startswith("/simple/") for path in asked)
    server.status = 503
    told = document(llmcli("doctor", "--network", "--json"))["network"]
    assert (told[0]["reachable"], told[0]["problem"]) == (False, "status 503")


def test_a_network_that_does_not_answer(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: refused at once
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr("llmcli.catalog.sources.wheel.ping_index", lambda: "no such index")
        done = llmcli("doctor", "--network")
    assert done.code == 0
    assert "the hub (127.0.0.1:" in done.out
    assert "no such index" in done.out


def test_offline_and_network_exclude_each_other(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = llmcli("doctor", "--network", "--offline")
    assert (done.code, done.out) == (1, "")
    assert "--offline forbids them" in done.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert llmcli("doctor", "--network").code == 1
    assert llmcli("doctor").code == 0
