#!/usr/bin/env python3
"""Count which schemas of public test suites are taken, and which documents their grammars accept.

usage: .venv/bin/python scripts/reference/schema_suites.py [--suite FOLDER] [--maskbench FOLDER]
           [--count 0] [--random 5] [--seed 0] [--verbose]

FOLDER of --suite is a checkout of JSON-Schema-Test-Suite (all files of tests/draft2020-12 and
tests/draft7, with the formats). FOLDER of --maskbench has the JSON files of jsonschemabench's
branch maskbench (maskbench/data); its sets are counted by themselves. --count takes a random part
of each set, 0 all.

For each set the script prints

- how many schemas are taken, and how many of them strictly, so that all of the schema is enforced;
- how many valid documents of the suite are accepted. A valid document may be missing for a reason:
  properties in another order, properties that a closed object does not list, other white space;
- how many invalid documents of the suite are accepted, by strict grammars and by the others;
- how many of --random random documents of each strict grammar jsonschema finds invalid.

It exits with 1 if a strict grammar accepts an invalid document.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jsonschema
import regex

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import accepts
from scripts.reference.schema_documents import compile_schema, encode, make_judge, write_randomly

DRAFTS = ("draft2020-12", "draft7")
# Draft 7 lets implementations take contentMediaType and contentEncoding as annotations.
SKIPPED = {"draft7/optional/content.json"}
# what jsonschema raises for a schema that it cannot use
UNUSABLE = (
    jsonschema.SchemaError,
    jsonschema.exceptions._WrappedReferencingError,
    RecursionError,
    regex.error,
    re.error,
)


@dataclass(frozen=True)
class Case:
    """A schema with documents that are valid or invalid."""

    name: str
    schema: Any
    documents: tuple[tuple[Any, bool], ...]


@dataclass
class Result:
    """The counts of one set of schemas."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def suite_cases(folder: Path) -> Iterator[tuple[str, list[Case]]]:
    """Yield the name and the cases of each draft of JSON-Schema-Test-Suite."""
    for draft in DRAFTS:
        cases = []
        root = folder / "tests" / draft
        for file in sorted(root.rglob("*.json")):
            if f"{draft}/{file.relative_to(root)}" in SKIPPED:
                continue
            for group in json.loads(file.read_text()):
                schema = group["schema"]
                if isinstance(schema, dict) and "$schema" not in schema and draft == "draft7":
                    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
                documents = tuple((test["data"], test["valid"]) for test in group["tests"])
                name = f"{file.relative_to(root)}: {group['description']}"
                cases.append(Case(name, schema, documents))
        yield draft, cases


def maskbench_cases(folder: Path) -> Iterator[tuple[str, list[Case]]]:
    """Yield the name and the cases of each set of maskbench."""
    sets: dict[str, list[Case]] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        documents = tuple((test["data"], test["valid"]) for test in content["tests"])
        case = Case(file.stem, content["schema"], documents)
        sets.setdefault(file.stem.partition("---")[0], []).append(case)
    yield from sorted(sets.items())


def run_case(case: Case, result: Result, n_random: int, numbers: random.Random) -> None:
    """Add the outcome of one case to the counts."""
    counts = result.counts
    counts["schemas"] += 1
    try:
        grammar = compile_schema(case.schema, is_strict=False)
    except UserError as error:
        counts["refused"] += 1
        result.faults.append(f"refused   {case.name}: {error}")
        return
    counts["taken"] += 1
    is_strict = not grammar.not_enforced
    if is_strict:
        counts["strict"] += 1
        assert not compile_schema(case.schema, is_strict=True).not_enforced
    for document, is_valid in case.documents:
        word = "valid" if is_valid else "invalid" if is_strict else "invalid, not strict"
        is_accepted = accepts(grammar, encode(document))
        counts[f"{word}: all"] += 1
        counts[f"{word}: accepted"] += is_accepted
        if is_accepted and not is_valid and is_strict:
            result.faults.append(f"INVALID   {case.name}: {json.dumps(document)[:200]}")
    if is_strict and n_random:
        judge_randomly(case, result, n_random, numbers)


def judge_randomly(case: Case, result: Result, n_random: int, numbers: random.Random) -> None:
    """Let jsonschema judge random documents of a strict grammar."""
    grammar = compile_schema(case.schema, is_strict=True)
    try:
        judge = make_judge(case.schema)
        for _ in range(n_random):
            text = write_randomly(grammar, numbers)
            if text is None:
                continue
            result.counts["random"] += 1
            if not judge.is_valid(json.loads(text)):
                result.counts["random, invalid"] += 1
                result.faults.append(f"INVALID   {case.name}: {text.decode()}")
    except UNUSABLE:
        result.counts["no judge"] += 1


def report(name: str, result: Result, is_verbose: bool) -> None:
    """Print the counts of a set as one line, and its faults."""
    counts = result.counts
    schemas = counts["schemas"]
    print(
        f"{name:16} {schemas:5} schemas: taken {counts['taken'] / schemas:6.1%}, "
        f"strictly {counts['strict'] / schemas:6.1%}; "
        f"valid accepted {counts['valid: accepted']}/{counts['valid: all']}; "
        f"invalid accepted strictly {counts['invalid: accepted']}/{counts['invalid: all']}, "
        f"else {counts['invalid, not strict: accepted']}/{counts['invalid, not strict: all']}; "
        f"random invalid {counts['random, invalid']}/{counts['random']}",
        flush=True,
    )
    for fault in result.faults:
        if is_verbose or fault.startswith("INVALID"):
            print("   ", fault)


def main() -> None:
    """Parse the flags and run all sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", type=Path, help="a checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--maskbench", type=Path, help="the folder maskbench/data")
    parser.add_argument("--count", type=int, default=0, help="schemas of each set, 0 = all")
    parser.add_argument("--random", type=int, default=5, help="random documents of each schema")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print refused schemas, too")
    arguments = parser.parse_args()
    sets = [
        *(suite_cases(arguments.suite) if arguments.suite else ()),
        *(maskbench_cases(arguments.maskbench) if arguments.maskbench else ()),
    ]
    if not sets:
        parser.error("give --suite or --maskbench")
    total = Result()
    for name, cases in sets:
        numbers, result = random.Random(arguments.seed), Result()
        chosen = numbers.sample(cases, min(arguments.count or len(cases), len(cases)))
        for case in chosen:
            run_case(case, result, arguments.random, numbers)
        report(name, result, arguments.verbose)
        total.counts += result.counts
    report("together", total, is_verbose=False)
    raise SystemExit(int(bool(total.counts["invalid: accepted"] + total.counts["random, invalid"])))


if __name__ == "__main__":
    main()
