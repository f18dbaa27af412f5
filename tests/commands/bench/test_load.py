"""`llmcli bench load` against fake servers, and against a server that it starts."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmcli.bench.load import run, session
from tests.fixtures.cli import Done
from tests.fixtures.fakes import fake_runner
from tests.fixtures.load_server import Scripted, counted, plain, scripted, streamed, text
from tests.fixtures.server import CHAT, Served, serving

__all__ = ("scripted",)
Llmcli = Callable[..., Done]
SMALL = ("-p", "24", "-n", "4", "--requests", "6", "--warmup", "0")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set an empty home folder, and skip the pause before a load is measured."""
    monkeypatch.setenv("LLMCLI_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(session, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def llmcli_server() -> Iterator[Served]:
    """A running llmcli server whose fake model answers "hello", with 6 sequences."""
    with serving(fake_runner(b"hello", template=CHAT, n_ctx=512, n_seq_max=6)) as server:
        yield server


def test_a_load_on_an_llmcli_server_is_measured_saved_and_listed(
    llmcli: Llmcli, llmcli_server: Served
) -> None:
    done = llmcli(
        "bench",
        "load",
        llmcli_server.url,
        "--concurrency",
        "1,2",
        *SMALL,
        "--slo",
        "ttft:1e6",
        "--json",
    )
    assert done.code == 0, done.err
    first, second = json.loads(done.out)
    assert (first["completed"], first["failed"], first["slo_share"], second["level"]) == (
        6,
        0,
        1.0,
        2,
    )
    assert first["prompt_tokens_mean"] == pytest.approx(24, abs=3)
    assert first["ttft_ms"]["p50"] > 0 and first["ttft_ms"]["p99"] is None
    assert first["output_throughput"] == pytest.approx(first["samples_ts"][0], rel=1e-3)
    assert "distinct" in done.err
    saved = json.loads(llmcli("bench", "history", "--json").out)
    assert [row["test"] for row in saved] == ["load 24+4 1 at once", "load 24+4 2 at once"]
    assert "24+4" in llmcli("bench", "history").out
    assert "have no test in common" in llmcli("bench", "compare", "1", "2").err


def test_the_printed_result_has_tables_and_definitions_and_the_report_has_charts(
    llmcli: Llmcli, llmcli_server: Served, tmp_path: Path
) -> None:
    page = tmp_path / "load.html"
    words = ("--rate", "200,400", *SMALL, "-p", "120", "--mix", "sonnet", "--shared", "0.5")
    done = llmcli("bench", "load", llmcli_server.url, *words, "--report", str(page), "--chart")
    assert done.code == 0, done.err
    for expected in (
        "200/s poisson: ",
        "TTFT",
        "ttft p99",
        "goodput: ",
        "inter-token latency",
        "Throughput over load",
    ):
        assert expected in done.out
    root = ElementTree.fromstring(page.read_text().partition("\n")[2])
    headings = ["".join(heading.itertext()) for heading in root.iter("h2")]
    assert {"Throughput over load", "Time to first token", "Definitions"} <= set(headings)


def test_requests_of_a_file_set_their_own_max_tokens(
    llmcli: Llmcli, llmcli_server: Served, tmp_path: Path
) -> None:
    file, page = tmp_path / "own.jsonl", tmp_path / "own.html"
    file.write_text('{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}\n')
    words = ("--mix", str(file), *SMALL, "--report", str(page))
    done = llmcli("bench", "load", llmcli_server.url, *words)
    assert done.code == 0, done.err
    assert f"the requests of {file}, answers of" in done.out and "512 tokens" not in done.out
    assert "tokens unless they set it" in page.read_text()


def test_saved_loads_are_compared(llmcli: Llmcli, llmcli_server: Served) -> None:
    for _ in range(2):
        assert llmcli("bench", "load", llmcli_server.url, *SMALL, "-r", "2").code == 0
    done = llmcli("bench", "compare", "1", "2")
    assert done.code == 0, done.err
    assert "load 24+4 8 at once" in done.out


@pytest.mark.parametrize("words", [("compare",), ("--against",)])
def test_two_servers_are_compared_in_alternating_turns(
    llmcli: Llmcli, llmcli_server: Served, words: tuple[str, ...]
) -> None:
    done = llmcli(
        "bench", "load", llmcli_server.url, *words, llmcli_server.url, *SMALL, "-r", "2", "--json"
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    (test,) = document["tests"]
    assert (test["turns"], [row["side"] for row in document["rows"]]) == (2, ["A", "B"])
    assert [ratio["name"] for ratio in test["ratios"]][:2] == ["output tok/s", "ttft p50"]
    assert test["ratios"][0]["ratio"] > 0
    # Two turns are too few for a confidence interval.
    assert all(ratio["low"] is None for ratio in test["ratios"])


def test_find_max_reports_a_limit_that_no_load_meets(
    llmcli: Llmcli, llmcli_server: Served, tmp_path: Path
) -> None:
    page = tmp_path / "max.html"
    words = ("--find-max", "concurrency", *SMALL, "--report", str(page))
    done = llmcli("bench", "load", llmcli_server.url, *words, "--slo", "ttft:0.000001")
    assert done.code == 0, done.err
    assert "no load meets ttft:1e-06 for 95% of the requests: not even 1 at once" in done.out
    assert "What the search measured" in page.read_text()


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_rows_are_printed_as_csv_and_jsonl(
    llmcli: Llmcli, llmcli_server: Served, form: str
) -> None:
    done = llmcli("bench", "load", llmcli_server.url, *SMALL, "-o", form, "--no-history")
    assert done.code == 0, done.err
    assert "load 24+4 8 at once" in done.out
    assert len(done.out.splitlines()) == {"csv": 2, "jsonl": 1}[form]
    assert ("ttft_count" in done.out.split("\n")[0].split(",")) == (form == "csv")
    assert "nothing was measured" in llmcli("bench", "history").out


def test_failures_are_counted_by_kind_and_the_api_key_is_sent(
    llmcli: Llmcli, scripted: Callable[..., Scripted], tmp_path: Path
) -> None:
    busy = plain({"error": {"message": "busy"}}, "429 Too Many")
    server = scripted(streamed(text("a"), counted(9, 1)), busy, streamed(text("a"), counted(9, 1)))
    key = tmp_path / "key"
    key.write_text("secret\n")
    words = ("--concurrency", "1", *SMALL, "--api-key-file", str(key), "--body", '{"top_p": 0.5}')
    done = llmcli("bench", "load", server.url, *words)
    assert done.code == 0, done.err
    assert "5 answered, 1 failed" in done.out
    assert "failed: 1 http 429 (busy)" in done.out
    assert "Authorization: Bearer secret" in server.heads[0]
    assert (server.bodies[0]["top_p"], server.bodies[0]["model"]) == (0.5, "scripted")
    assert "secret" not in llmcli("bench", "history", "--json").out


def test_it_is_an_error_when_every_request_fails(
    llmcli: Llmcli, scripted: Callable[..., Scripted]
) -> None:
    done = llmcli(
        "bench", "load", scripted(plain({"error": {"message": "no"}}, "400 Bad")).url, *SMALL
    )
    assert (done.code, done.out) == (1, "")
    assert "error: every request failed (http 400: no)" in done.err


def test_a_server_without_the_openai_api_is_an_error(
    llmcli: Llmcli, scripted: Callable[..., Scripted]
) -> None:
    done = llmcli("bench", "load", scripted().url + "/odd", *SMALL)
    assert (done.code, done.out) == (1, "")
    assert "does not use OpenAI's API" in done.err
    assert "of a server with OpenAI's API" in done.err


def test_a_model_is_served_only_during_the_measurement(
    llmcli: Llmcli, llmcli_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    @contextmanager
    def open_local_server(ref: str, flags: list[str]) -> Iterator[str]:
        events.append((ref, flags))
        yield llmcli_server.url
        events.append("stopped")

    monkeypatch.setattr(run, "open_local_server", open_local_server)
    done = llmcli("bench", "load", "smollm2:135m", "--serve", "-t 2 -np '4'", *SMALL)
    assert done.code == 0, done.err
    assert events == [("smollm2:135m", ["-t", "2", "-np", "4"]), "stopped"]


def test_the_reason_is_reported_when_the_server_does_not_start(
    llmcli: Llmcli, tmp_path: Path
) -> None:
    done = llmcli("bench", "load", str(tmp_path / "none.gguf"), *SMALL)
    assert done.code == 1
    assert "did not start" in done.err and "none.gguf" in done.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("http://h", "and", "more"), 2, "expected one or two servers"),
        (("http://h", "--find-max", "rate"), 2, "needs --slo"),
        (("http://h", "--find-max", "all", "--slo", "ttft:1"), 2, "'all' is unknown"),
        (
            ("http://h", "--find-max", "rate", "--slo", "ttft:1", "--rate", "2"),
            2,
            "chooses the loads itself",
        ),
        (
            ("http://h", "--find-max", "rate", "--slo", "ttft:1", "--against", "http://g"),
            2,
            "on one server",
        ),
        (("http://h", "--slo", "tt:3"), 1, "invalid limit 'tt:3'"),
        (("http://h", "--arrivals", "often"), 2, "'often' is unknown"),
        (("http://h", "--rate", "0"), 1, "'0' is invalid"),
        (("http://h", "--mix", "own.jsonl", "--shared", "0.5"), 2, "not to own.jsonl"),
        (("http://h", "--serve", "-t 2"), 2, "http://h is running already"),
        (
            ("http://h", "--arrivals", "gamma", "--concurrency", "2"),
            2,
            "--arrivals applies to an open loop",
        ),
        (
            ("http://h", "--arrivals", "gamma", "--find-max", "concurrency", "--slo", "ttft:1"),
            2,
            "applies to an open loop",
        ),
        (
            ("http://h", "--rate", "1", "--burstiness", "2"),
            2,
            "--burstiness needs --arrivals gamma",
        ),
        (("http://h", "--slo", "ttft:1", "--percent", "99"), 2, "--percent needs --find-max"),
        (("http://h", "--endpoint", "talk"), 2, "'talk' is unknown"),
        (("http://h", "--body", "[1]"), 1, "not a JSON object"),
        (("http://h", "-o", "xml"), 2, "'xml' is unknown"),
        (("http://h.invalid", "--offline"), 1, "not this machine"),
        (("ftp://h",), 1, "is not a server address"),
        (("http://127.0.0.1:1",), 1, "127.0.0.1:1"),
        (("http://h", "--mix", "none.jsonl", "--api-key-file", "none"), 1, "cannot read none"),
    ],
)
def test_invalid_arguments_are_an_error_before_any_measurement(
    llmcli: Llmcli, words: tuple[str, ...], code: int, message: str
) -> None:
    done = llmcli("bench", "load", *words)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
