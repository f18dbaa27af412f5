"""`llmcli doctor`: its JSON, the warnings and their commands, and that it uses the network only
with --network.
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
from llmcli.runtime.binding.kernels import products, row_draws, row_scan
from llmcli.runtime.binding.placement import amx, devices, rpc
from quant.native import ggml, kernels
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a machine with no load, its memory bandwidth and a small cache, so that little memory is
    read.
    """
    monkeypatch.setattr(host, "last_cache_bytes", lambda: 16)
    monkeypatch.setattr("llmcli.bench.cost.weight_kernels.MIN_BYTES", 1 << 18)
    reading = memory_bandwidth.BandwidthReading(1 << 28, 2, (2e10, 3e10))
    monkeypatch.setattr(memory_bandwidth, "measure_bandwidth", lambda *sizes, **more: reading)
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def parse_json(done: Done) -> Any:
    return json.loads(done.out)


def test_the_json_has_all_sections(llmcli: Llmcli, home: Path) -> None:
    folder = home / "data" / "models" / "one"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(bytes(1000))
    (folder / "b.gguf").symlink_to(folder / "a.gguf")
    done = llmcli("doctor", "--json")
    assert done.code == 0
    document = parse_json(done)
    sections = (
        "versions",
        "cpu",
        "backends",
        "parts",
        "devices",
        "gpus",
        "memory",
        "weight_kernels",
        "folders",
        "network",
        "workers",
        "warnings",
        "ray",
    )
    assert tuple(document) == sections
    assert document["versions"]["llmcli"]
    assert document["versions"]["llama-cpp-python"]
    assert document["cpu"]["missing"] == []
    assert "CPU" in document["backends"]
    assert "cpu" in [device["kind"] for device in document["devices"]]
    assert document["network"] is None
    assert document["workers"] is None
    assert document["ray"] is None
    assert document["memory"]["read_bandwidth_bytes_per_second"] in (3e10, None)
    folders = {row["what"]: row for row in document["folders"]}
    assert (folders["models"]["bytes"], folders["models"]["files"]) == (1000, 1)
    assert folders["llama.cpp builds"]["path"] == str(home / "cache" / "wheels")
    assert folders["conversations and profiles"]["bytes"] == 0


def test_the_speed_of_every_type_of_weights_is_measured(llmcli: Llmcli) -> None:
    found = {row["type"]: row for row in parse_json(llmcli("doctor", "--json"))["weight_kernels"]}
    assert set(found) == set(products.TYPES)
    for row in found.values():
        assert row["bytes_per_second"] == row[f"bytes_per_second_{row['kernel']}"] > 0
    lines = llmcli("doctor").out.splitlines()
    (header,) = (line for line in lines if "tok/s of 1B" in line)
    assert "in the model" not in header
    table = lines[lines.index(header) + 1 :][: len(found)]
    assert [line.split()[0] for line in table] == list(found)


def test_weights_are_not_multiplied_without_memory(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 20)
    assert parse_json(llmcli("doctor", "--json"))["weight_kernels"] == []
    assert "tok/s of 1B" not in llmcli("doctor").out


def test_the_printed_report_has_all_sections(llmcli: Llmcli) -> None:
    out = llmcli("doctor").out
    for text in ("processor: ", "llama.cpp uses: ", "memory: ", "stored files", "device CPU"):
        assert text in out


def test_a_build_without_avx2_is_a_warning_with_the_rebuild_command(
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
    assert parse_json(llmcli("doctor", "--json"))["cpu"]["unused"] == ["AVX2", "FMA"]
    monkeypatch.setattr(diagnostics, "SETUP_SCRIPT", Path("nowhere"))
    assert "-m pip install --force-reinstall" in llmcli("doctor").err


def test_a_build_for_another_processor_is_a_warning(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: frozenset({"pni"}))
    monkeypatch.setattr(
        cpu_features,
        "build_features",
        lambda: cpu_features.parse_system_info("CPU : SSE3 = 1 | AVX512 = 1 | "),
    )
    assert "AVX512, which this processor does not support" in llmcli("doctor").err


def test_a_library_that_does_not_load_is_an_error_in_the_report(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise UserError("llama.cpp's library does not load: libgomp.so.1", hint="install it")

    monkeypatch.setattr(cpu_features, "build_features", fail)
    done = llmcli("doctor", "--json")
    assert done.code == 1
    assert "libgomp" in parse_json(done)["warnings"][0]["what"]
    assert "libgomp" in done.err
    assert parse_json(done)["devices"] == []
    assert "unknown" in llmcli("doctor").out


def test_a_busy_machine_is_a_warning(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(host, "core_count", lambda: 4)
    done = llmcli("doctor")
    assert "3.0 programs ran in the last minute on 4 cores" in done.err
    assert "-t 1 leaves cores to the other programs" in done.err


def test_figures_are_unknown_without_proc(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("available_memory", "total_memory", "last_cache_bytes"):
        monkeypatch.setattr(host, name, lambda: None)
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: None)
    document = parse_json(llmcli("doctor", "--json"))
    assert (
        document["memory"]["available_bytes"]
        is document["memory"]["read_bandwidth_bytes_per_second"]
        is None
    )
    assert all(feature["cpu"] is None for feature in document["cpu"]["features"].values())
    assert document["cpu"]["unused"] == []
    assert "memory: unknown of unknown" in llmcli("doctor").out


class _Server(BaseHTTPRequestHandler):
    """The hub and the package index as one local server; `requested_paths` has the path of every
    request.
    """

    status = 200

    def do_HEAD(self) -> None:
        self.requested_paths.append(self.path)  # type: ignore[attr-defined]
        self.send_response(self.status)
        self.end_headers()

    def do_GET(self) -> None:
        self.requested_paths.append(self.path)  # type: ignore[attr-defined]
        page = b'<a href="llama_cpp_python-0.3.36.tar.gz">llama_cpp_python-0.3.36.tar.gz</a>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Server]]:
    """Start the server, let llmcli use it as the hub and as pip's index, and return its handler
    class.
    """
    handler = type("Handler", (_Server,), {"requested_paths": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{http_server.server_port}"
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
        http_server.shutdown()
        thread.join()


def test_the_network_is_used_only_with_network(llmcli: Llmcli, server: type[_Server]) -> None:
    requested_paths = server.requested_paths  # type: ignore[attr-defined]
    assert parse_json(llmcli("doctor", "--json"))["network"] is None
    assert requested_paths == []
    hosts = parse_json(llmcli("doctor", "--network", "--json"))["network"]
    assert [host["reachable"] for host in hosts] == [True, True], hosts
    assert any(path.startswith("/api/") for path in requested_paths)
    assert any(path.startswith("/simple/") for path in requested_paths)
    server.status = 503
    hosts = parse_json(llmcli("doctor", "--network", "--json"))["network"]
    assert (hosts[0]["reachable"], hosts[0]["problem"]) == (False, "status 503")


def test_an_unreachable_network_is_reported(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound:  # without listen(), connections are refused at once
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setattr("llmcli.catalog.sources.wheel.ping_index", lambda: "no such index")
        done = llmcli("doctor", "--network")
    assert done.code == 0
    assert "the hub (127.0.0.1:" in done.out
    assert "no such index" in done.out


def test_offline_refuses_network(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    done = llmcli("doctor", "--network", "--offline")
    assert (done.code, done.out) == (1, "")
    assert "--offline forbids them" in done.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert llmcli("doctor", "--network").code == 1
    assert llmcli("doctor").code == 0


def test_the_parts_of_the_installation_are_listed_and_what_is_lost_without_one(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {part["what"]: part for part in parse_json(llmcli("doctor", "--json"))["parts"]}
    assert {
        "scans of logits",
        "products in bfloat16",
        "products of interleaved rows",
        "RPC",
    } <= set(parts)
    assert all(part["active"] == (part["problem"] is None) for part in parts.values())
    assert all(part["without_it"] for part in parts.values())

    missing = kernels.Kernels(None, "kernels-x86-64", "kernels-x86-64 was not built: no C compiler")
    monkeypatch.setattr(kernels, "open_kernels", lambda: missing)
    row_scan.load_row_scan.cache_clear()
    functions = ggml.c_function, ggml._encoder
    for function in functions:
        function.cache_clear()
    monkeypatch.setattr(rpc, "is_built", lambda: False)
    done = llmcli("doctor")
    document = parse_json(llmcli("doctor", "--json"))
    for function in (*functions, row_scan.load_row_scan):
        function.cache_clear()
    for name in ("scans of logits", "encoders of Q4_K, Q5_K, Q6_K", "search of scales"):
        assert f"not active: {name}: kernels-x86-64 was not built: no C compiler" in done.out
    assert "not active: RPC: llama.cpp was built without it" in done.out
    assert done.err.count("no C compiler") == 1  # one warning for all
    assert "hint: install a C compiler" in done.err
    assert [part["active"] for part in document["parts"] if "logits" in part["what"]] == [False]
    assert "C compiler" in document["warnings"][0]["what"]


def test_a_library_of_another_version_is_not_used(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its structures may be laid out differently."""
    if row_scan.load_row_scan() is None:
        pytest.skip("there is no C compiler here")
    loaders = row_scan.load_row_scan, row_draws.load_row_draws
    monkeypatch.setattr(row_scan, "INTERFACE", row_scan.INTERFACE + 1)
    for loader in loaders:
        loader.cache_clear()
    done = llmcli("doctor")
    assert [loader() for loader in loaders] == [None, None]
    for loader in loaders:
        loader.cache_clear()
    for name in ("scans of logits", "draws from many rows"):
        assert f"not active: {name}: the installed library is that of another version" in done.out
        assert f"warning: {name}: off, because the installed library is" in done.err


def test_a_build_with_faulty_amx_is_a_warning_with_the_command_that_mends_it(
    llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "repacks_for_amx", lambda: True)
    monkeypatch.setattr(amx, "is_build_faulty", lambda: True)
    done = llmcli("doctor")
    assert "warning: AMX: off, because the GCC that compiled llama.cpp" in done.err
    assert "hint: use GCC 14 or newer, or: scripts/setup --again" in done.err
