"""scripts/reference/llama_server_tests.py: the outcomes of two servers are compared without the tests
that are meant to differ, and those of llama-server are kept in a file.
"""

from pathlib import Path

from scripts.reference import llama_server_shim as shim
from scripts.reference import llama_server_tests as script
from scripts.reference.llama_server_tests import FileResult

MEANT, OTHER = "test_cors_options[localhost-A-b]", "test_health"


def test_the_share_leaves_out_what_is_meant_to_differ() -> None:
    real = FileResult(frozenset({MEANT, OTHER, "test_c"}), frozenset({MEANT, OTHER}))
    own = FileResult(real.tests, frozenset({OTHER}))
    assert script.missing_tests(own, real) == [MEANT]
    assert script.share(own, real) == 1.0
    assert script.share(FileResult(real.tests, frozenset({MEANT})), real) == 0.0
    assert "meant to differ  1" in script.format_row("security", own, real)


def test_outcomes_are_kept_in_a_file(tmp_path: Path) -> None:
    results = {"basic": FileResult(frozenset({"test_a", "test_b"}), frozenset({"test_a"}))}
    file = tmp_path / "results.json"
    assert script.read_results(file) == {}
    script.write_results(file, results)
    assert script.read_results(file) == results


def test_options_of_llama_server_become_those_of_serve() -> None:
    words = ["--model", "reranker.gguf", "--verbose", "--ctx-size", "512", "--parallel", "2"]
    assert shim.translate([*words, "--threads", "1"]) == [
        *("--trust", "--model", "reranker.gguf", "--verbose", "--ctx-size", "512"),
        *("--parallel", "2", "--threads", "1", "--no-metrics", "--kv-unified-per-slot", "256"),
    ]
