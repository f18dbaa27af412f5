#!/usr/bin/env python3
"""Compare Skeleton-of-Thought with plain answers: the time and the tokens of each question.

usage: .venv/bin/python scripts/benchmarks/skeleton_of_thought.py REF QUESTIONS.jsonl
       [--questions 10] [--predict 256] [--threads N] [--parallel 10]

QUESTIONS.jsonl has one question per line: {"turns": ["…"]} (as in vicuna_bench_question.jsonl),
{"prompt": "…"} or "…". The model answers each question twice from an empty cache: plainly, and by
Skeleton-of-Thought (an outline first, then its points in parallel). Decoding is greedy, and the
order alternates. The script prints a line per question and the medians. It prints token counts,
too, because the two answers may differ in length.
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
    """The cost of one answer. `points`: number of points of its outline; 0 without an outline."""

    seconds: float
    tokens: int
    points: int


def main() -> None:
    """Parse the flags, answer all questions and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref")
    parser.add_argument("questions_file", type=Path)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--predict", type=int, default=256)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--parallel", type=int, default=skeleton_of_thought.MAX_POINTS)
    args = parser.parse_args()
    options = RunOptions(threads=args.threads)
    flags = RunFlags(options, {"temp": 0.0}, NO_SEARCH, predict=args.predict, ngram_draft="off")
    rows: list[dict[str, Row]] = []
    with open_server_model.open_server_model(
        args.ref, flags, config.load_config(), UI(), args.parallel
    ) as hosted:
        for number, question in enumerate(read(args.questions_file, args.questions)):
            turns = list(PLANS)[:: 1 if number % 2 else -1]
            rows.append({name: ask(hosted, flags, question, name, args.parallel) for name in turns})
            plain, skeleton = rows[-1]["plain"], rows[-1]["skeleton"]
            figures = f"{plain.seconds:7.2f} s {plain.tokens:4} tok  {skeleton.seconds:7.2f} s {skeleton.tokens:4} tok"
            ratio = plain.seconds / skeleton.seconds
            print(
                f"{figures} {skeleton.points:2} points  {ratio:5.2f}x  {question[:60]}", flush=True
            )
    outlined = [row for row in rows if row["skeleton"].points]
    print(f"{len(outlined)} of {len(rows)} have an outline; of those:")
    for name in PLANS:
        rows_of_plan = [row[name] for row in outlined]
        rate = sum(row.tokens for row in rows_of_plan) / sum(row.seconds for row in rows_of_plan)
        print(
            f"{name:8}  median {statistics.median(row.seconds for row in rows_of_plan):.2f} s, "
            f"{statistics.median(row.tokens for row in rows_of_plan):.0f} tokens, {rate:.1f} tokens/s"
        )
    median_ratio = statistics.median(
        row["plain"].seconds / row["skeleton"].seconds for row in outlined
    )
    print(f"plain / skeleton, median of the questions: {median_ratio:.2f}x")


def ask(
    hosted: open_server_model.ServerModel, flags: RunFlags, question: str, name: str, parallel: int
) -> Row:
    """Answer one question from an empty cache by the plan `name` of PLANS, with up to `parallel`
    points at the same time; return the cost.
    """
    hosted.runner.engine.ledger.evict_idle()
    body = {"messages": [{"role": "user", "content": question}]}
    documents: list[Any] = []
    began = time.perf_counter()
    request = FORMS[CHAT_PATH](body, hosted.runner, run.build_settings(hosted, flags, 0))
    executor = BatchExecutor(hosted.runner, parallel, lambda index, found: documents.append(found))
    executor.run(iter([BatchTask.begin(0, PLANS[name](request))]))
    return Row(
        time.perf_counter() - began,
        documents[0]["usage"]["completion_tokens"],
        len(documents[0].get("skeleton", ())),
    )


def read(path: Path, count: int) -> list[str]:
    """Return the questions in the first `count` lines of a JSONL file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    return [
        row if isinstance(row, str) else row["turns"][0] if "turns" in row else row["prompt"]
        for row in rows
    ]


if __name__ == "__main__":
    main()
