#!/usr/bin/env python3
"""Run llama-server's own tests against `llmcli serve`, and against llama-server itself.

usage: LLAMA_SERVER_TESTS=FOLDER .venv/bin/python scripts/reference/llama_server_tests.py [FILE ...]
       [--llama-server PROGRAM] [--results FILE] [--models FOLDER] [-t THREADS] [-k EXPRESSION]
       [--json]

FOLDER is tools/server/tests of llama.cpp's source, which is in llama-cpp-python's source
distribution. A FILE is a name such as `completion` (unit/test_completion.py); by default the files of
the features that llmcli has. Models that the tests would download are replaced by small stand-ins
(llama_server_models.py), the same for both servers. With --llama-server, the outcomes of
llama-server are stored in --results; without it, they are read from there. If LLAMA_SERVER_LOGS names
a folder, pytest's output for each file and server is kept there.

For each file the script prints how many tests pass with both servers, and how many of those that
llama-server passes. Then it prints the tests that only llama-server passes: those of DIFFERENCES with
the reason, the others as failures. It exits with 1 if a file has less than GOAL of what llama-server
passes, not counting DIFFERENCES.
"""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.reference.llama_server_models import make_models  # noqa: E402

GOAL = 0.9
FILE_SECONDS = 1800
FILES = (
    "completion",
    "chat_completion",
    "template",
    "embedding",
    "rerank",
    "compat_anthropic",
    "compat_oai_responses",
    "ctx_shift",
    "slot_save",
    "metrics",
    "security",
    "basic",
    "tokenize",
    "ignore_eos",
    "infill",
)
# Tests whose outcome is meant to differ: a pattern of their names, and the reason.
DIFFERENCES: dict[str, str] = {
    r"^test_chat_completion\[.*This is not a chat template": (
        "a template that shows no message is refused when the server starts"
    ),
    r"^test_chat_template_assistant_prefill\[prefill1-": (
        "the text parts of a message are joined by one line end, also where it is continued"
    ),
    r"^test_invalid_chat_completion_req\[messages7\]": (
        "several assistant messages at the end are accepted, as by OpenAI"
    ),
    r"^test_reasoning\[(deepseek|Qwen-QwQ|Cohere).*-auto-": (
        "a template whose enable_thinking is not set decides by itself, as in transformers; "
        "--reasoning on sets it, as llama-server's auto does"
    ),
    r"^test_anthropic_(vision_format_accepted|tool_result_with_image)$": (
        "images are refused with 400 and the place in the request; clients retry after a 500"
    ),
    r"^test_anthropic_empty_messages$": "a request without messages is refused, as by Anthropic",
    r"^test_responses_stream_with_llama_telemetry$": (
        "an answer that max_output_tokens ends is sent as response.incomplete, as by OpenAI"
    ),
    r"^test_slot_restore_legacy_token_list$": (
        "the file of a slot has a format that names its model, because llama.cpp loads any bytes"
    ),
    r"^test_cors_options\[": "web pages of other sites are refused until --cors names them",
    r"^test_cors_origins_": "there is no router: a server has one model",
    r"^test_cors_proxy_": "requests are not forwarded to other servers",
    r"^test_server_model_aliases_and_tags$": (
        "each alias is listed as a model, because clients choose from the list"
    ),
    r"^test_infill_with_input_extra$": (
        "prefix and suffix are never shortened; llama-server cuts them to a part of the batch"
    ),
}


@dataclass(frozen=True, slots=True)
class FileResult:
    """The outcome of one file with one server: the names of all tests that were not skipped, and of
    those that passed.
    """

    tests: frozenset[str]
    passed: frozenset[str]


def main() -> int:
    """Parse the options, run the files with both servers and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE")
    parser.add_argument("--llama-server", type=Path, help="the program to compare with")
    parser.add_argument("--results", type=Path, help="the outcomes of llama-server, a JSON file")
    parser.add_argument("-t", "--threads", type=int, help="of both servers [their defaults]")
    parser.add_argument("--models", type=Path, help="folder of the stand-ins [a temporary one]")
    parser.add_argument("-k", dest="expression", default="", help="as of pytest")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    folder = os.environ.get("LLAMA_SERVER_TESTS")
    if not folder or not (tests := Path(folder).resolve()).joinpath("utils.py").is_file():
        parser.error("set LLAMA_SERVER_TESTS to tools/server/tests of llama.cpp's source")
    with tempfile.TemporaryDirectory() as temporary:
        models = (args.models or Path(temporary) / "models").resolve()
        make_models(models, tests.parents[2])
        run = SuiteRun(tests, models, Path(temporary), args.expression, args.threads)
        rows = {}
        stored = read_results(args.results) if args.results else {}
        for name in args.files:
            if args.llama_server:
                stored[name] = run.file(name, args.llama_server.resolve())
                if args.results:
                    write_results(args.results, stored)
            rows[name] = run.file(name, None), stored.get(name)
            if not args.json:
                print(format_row(name, *rows[name]), flush=True)
    missed = {name: missing_tests(*pair) for name, pair in rows.items()}
    if args.json:
        print(json.dumps(build_document(rows), indent=1))
    else:
        print_missed(missed)
    return int(any(share(*pair) < GOAL for pair in rows.values()))


class SuiteRun:
    """Runs files of the tests. `tests`: their folder. `models`: that of the stand-ins.
    `expression`: chooses tests, as -k of pytest. `threads`: of a server; None: its default.
    """

    def __init__(
        self,
        tests: Path,
        models: Path,
        temporary: Path,
        expression: str = "",
        threads: int | None = None,
    ) -> None:
        self.tests, self.models, self.temporary = tests, models, temporary
        self.expression, self.threads = expression, threads
        self.program = temporary / "llama-server"
        words = shlex.join([sys.executable, "-m", "scripts.reference.llama_server_shim"])
        self.program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.program.chmod(0o755)
        # The tests import this module only for downloads, which the stand-ins replace.
        (temporary / "wget.py").write_text("def download(url, out=None):\n    raise OSError(url)\n")
        (temporary / "no_downloads.py").write_text(
            "def pytest_collection_finish(session):\n"
            "    import utils\n"
            "    utils.ServerPreset.load_all = staticmethod(lambda: None)\n"
        )

    def file(self, name: str, real: Path | None) -> FileResult:
        """Return the outcome of one file. `real`: the llama-server to run; None: llmcli."""
        report = self.temporary / f"{name}.xml"
        report.unlink(missing_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "PORT": str(port),
            "LLAMA_SERVER_BIN_PATH": str(self.program),
            "LLAMA_SERVER_REAL": str(real or ""),
            "LLAMA_SERVER_MODELS": str(self.models),
            "LLAMA_SERVER_THREADS": str(self.threads or ""),
            "LLMCLI_HOME": str(self.temporary / "home"),
            "PYTHONPATH": os.pathsep.join([str(self.temporary), str(ROOT)]),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no_downloads",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-p", "no:xdist", f"--junit-xml={report}", f"unit/test_{name}.py"]
        command += ["-k", self.expression] if self.expression else []
        with (self.temporary / f"{name}.log").open("wb") as log:
            subprocess.run(
                command,
                cwd=self.tests,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=FILE_SECONDS,
                check=False,
            )
        if keep := os.environ.get("LLAMA_SERVER_LOGS"):
            side = "real" if real else "llmcli"
            Path(keep, f"{name}.{side}.log").write_bytes(Path(log.name).read_bytes())
        return read_report(report)


def read_report(path: Path) -> FileResult:
    """Return the outcome in a report of pytest. A file that could not be collected has no tests."""
    tests, passed = set(), set()
    if path.exists():
        for case in ET.parse(path).iter("testcase"):
            tags = {child.tag for child in case}
            if "skipped" in tags or ("error" in tags and not case.get("name")):
                continue
            tests.add(case.get("name", ""))
            if not tags & {"failure", "error"}:
                passed.add(case.get("name", ""))
    return FileResult(frozenset(tests), frozenset(passed))


def read_results(path: Path) -> dict[str, FileResult]:
    """Return the outcomes in a file of write_results(), by the names of the files of tests. None are
    in a file that does not exist.
    """
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: FileResult(frozenset(result["tests"]), frozenset(result["passed"]))
        for name, result in document.items()
    }


def write_results(path: Path, results: dict[str, FileResult]) -> None:
    """Store the outcomes of one server as a JSON object."""
    document = {
        name: {"tests": sorted(result.tests), "passed": sorted(result.passed)}
        for name, result in results.items()
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def difference(test: str) -> str | None:
    """Return the reason why a test is meant to differ, or None."""
    return next((why for pattern, why in DIFFERENCES.items() if re.search(pattern, test)), None)


def missing_tests(own: FileResult, real: FileResult | None) -> list[str]:
    """Return the tests that llama-server passes and llmcli does not; without llama-server, all that
    llmcli does not pass.
    """
    return sorted((real.passed if real else own.tests) - own.passed)


def share(own: FileResult, real: FileResult | None) -> float:
    """Return the share of llama-server's passed tests that llmcli passes, without DIFFERENCES."""
    expected = {test for test in (real.passed if real else own.tests) if not difference(test)}
    return len(expected & own.passed) / len(expected) if expected else 1.0


def format_row(name: str, own: FileResult, real: FileResult | None) -> str:
    """Return one line of the table."""
    line = f"{name:22} llmcli {len(own.passed):3} of {len(own.tests):3}"
    if real is None:
        return line
    n_meant = sum(difference(test) is not None for test in missing_tests(own, real))
    return (
        f"{line}   llama-server {len(real.passed):3}   both {len(own.passed & real.passed):3}"
        f"   meant to differ {n_meant:2}   share {share(own, real):.2f}"
    )


def print_missed(missed: dict[str, list[str]]) -> None:
    """Print the tests that llmcli does not pass, with the reasons of those that are meant to."""
    for name, tests in missed.items():
        for test in tests:
            why = difference(test)
            print(
                f"{'differs' if why else 'FAILED '} {name}: {test}" + (f" ({why})" if why else "")
            )


def build_document(rows: dict[str, tuple[FileResult, FileResult | None]]) -> dict[str, object]:
    """Return the table as a JSON object."""
    return {
        name: {
            "tests": len(own.tests),
            "llmcli": len(own.passed),
            "llama_server": len(real.passed) if real else None,
            "share": share(own, real),
            "missing": {test: difference(test) for test in missing_tests(own, real)},
        }
        for name, (own, real) in rows.items()
    }


if __name__ == "__main__":
    sys.exit(main())
