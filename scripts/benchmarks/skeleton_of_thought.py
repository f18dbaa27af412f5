#!/usr/bin/env python3
"""Compare Skeleton-of-Thought with plain answers: time and tokens of each question on one open
model.

usage: .venv/bin/python scripts/benchmarks/skeleton_of_thought.py REF QUESTIONS.jsonl
       [--questions 10] [--predict 256] [--threads N] [--parallel 10]

QUESTIONS.jsonl has one question per line: {"turns": ["…"]} (as vicuna_bench_question.jsonl),
{"prompt": "…"} or "…". Each question is answered plainly and by its skeleton, greedily, in
alternating order, with an empty cache. The script prints a line per question and the medians. The
texts may differ in length, so the tokens are printed, too.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli import config
from llmcli.api.forms import FORMS
from llmcli.batch import plans, run, skeleton_of_thought
from llmcli.batch.executor import BatchExecutor, BatchTask
from llmcli.batch.request_line import CHAT_PATH
from llmcli.model_loader import open_server_model
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import RunOptions
from llmcli.ui import UI

PLANS = {"plain": plans.plain, "skeleton": skeleton_of_thought.skeleton}


@dataclass(frozen=True)
class Row:
    """The cost of one answer; `points` is 0 if there was no outline."""

    seconds: float
    tokens: int
    points: int


def main() -> None:
    """Answer all questions and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("questions_file", type=Path)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--predict", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--parallel", type=int, default=skeleton_of_thought.MAX_POINTS)
    asked = parser.parse_args()
    options = RunOptions(threads=asked.threads)
    given = RunFlags(options, {"temp": 0.0}, NO_SEARCH, predict=asked.predict, ngram_draft="off")
    rows: list[dict[str, Row]] = []
    with open_server_model.open_server_model(
        asked.ref, given, config.load_config(), UI(), asked.parallel
    ) as hosted:
        for number, question in enumerate(read(asked.questions_file, asked.questions)):
            turns = list(PLANS)[:: 1 if number % 2 else -1]
            rows.append(
                {name: ask(hosted, given, question, name, asked.parallel) for name in turns}
            )
            plain, parts = rows[-1]["plain"], rows[-1]["skeleton"]
            told = f"{plain.seconds:7.2f} s {plain.tokens:4} tok  {parts.seconds:7.2f} s {parts.tokens:4} tok"
            ratio = plain.seconds / parts.seconds
            print(f"{told} {parts.points:2} points  {ratio:5.2f}x  {question[:60]}", flush=True)
    outlined = [row for row in rows if row["skeleton"].points]
    print(f"{len(outlined)} of {len(rows)} have an outline; of those:")
    for name in PLANS:
        each = [row[name] for row in outlined]
        rate = sum(row.tokens for row in each) / sum(row.seconds for row in each)
        print(
            f"{name:8}  median {statistics.median(row.seconds for row in each):.2f} s, "
            f"{statistics.median(row.tokens for row in each):.0f} tokens, {rate:.1f} tokens/s"
        )
    middle = statistics.median(row["plain"].seconds / row["skeleton"].seconds for row in outlined)
    print(f"plain / skeleton, median of the questions: {middle:.2f}x")


def ask(
    hosted: open_server_model.ServerModel, given: RunFlags, question: str, name: str, parallel: int
) -> Row:
    """Answer one question in one way from an empty cache."""
    hosted.runner.engine.ledger.evict_idle()
    body = {"messages": [{"role": "user", "content": question}]}
    came: list[Any] = []
    began = time.perf_counter()
    form = FORMS[CHAT_PATH](body, hosted.runner, run.build_settings(hosted, given, 0))
    work = BatchExecutor(hosted.runner, parallel, lambda index, found: came.append(found))
    work.run(iter([BatchTask.begin(0, PLANS[name](form))]))
    return Row(
        time.perf_counter() - began,
        came[0]["usage"]["completion_tokens"],
        len(came[0].get("skeleton", ())),
    )


def read(path: Path, count: int) -> list[str]:
    """Return the first questions of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    return [
        row if isinstance(row, str) else row["turns"][0] if "turns" in row else row["prompt"]
        for row in rows
    ]


if __name__ == "__main__":
    main()
