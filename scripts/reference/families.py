#!/usr/bin/env python3
"""Convert tiny random checkpoints of all families, and compare the files with transformers and with
llama.cpp's own converter.

usage: .venv/bin/python scripts/reference/families.py [--only REGEX] [--bpe FOLDER] [--llama-cli PATH]
       [--llama-mtmd-cli PATH] [--upstream FOLDER] [--json FILE]
       .venv/bin/python scripts/reference/families.py --page FILE.json ... --upstream FOLDER

Each row is a family: the converter (native, or llama.cpp), the normalized mean squared error of the
F32 file's logits against transformers, how many known differences its tokenizer has, whether it
has prediction layers (MTP), what a Q4_K_M file answers in llama-cli, what becomes of its vision part,
and, for native families, how the metadata and tensors differ from those of llama.cpp's converter.

--bpe names a folder with a byte-level tokenizer, which some of llama.cpp's conversions need. Those
of the Qwen2 classes need a tokenizer of Qwen.
--upstream names a source tree of llama.cpp, whose converter writes the files to compare with.
--page writes the rows of earlier runs to docs/families.md, of each class the last one, and the
classes of language models that the converter of --upstream knows and that are not compared.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import transformers

from llmcli.model_loader.llama_converter import converter_classes
from quant.convert.archs import ARCHS
from quant.model_file import read_header
from quant.model_file.model_header import ModelHeader
from quant.quantize import plan, write
from quant.source.source import DIFFERING_KEY, KNOWN_DIFFERENCES_KEY
from scripts.reference import family_vision
from tests.quant import families, llama_cpp_families, predicting_checkpoint

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
PAGE_START = """# Families

This page is for people who want to know whether their model is converted correctly, and how that was checked.

Each row is a tiny random checkpoint of a class of transformers, converted to F32. Its file was run by llama.cpp on 320
tokens, and its outputs (logits, vectors of tokens, or scores) were compared with those of transformers:

<!-- parsed: takes an hour -->
```console
$ .venv/bin/python scripts/reference/families.py --upstream LLAMA_CPP --bpe TOKENIZER --llama-cli PROGRAM --llama-mtmd-cli PROGRAM --json rows.json
$ .venv/bin/python scripts/reference/families.py --page rows.json --upstream LLAMA_CPP
```

- **Converter**: llmcli itself (native), or llama.cpp's own converter.
- **Error**: the squared error of the outputs, divided by the sum of their squares. Below 1e-6, the model is the same.
- **Tokenizer**: whether llama.cpp gives the same ids for more than 1,000 strings as the checkpoint's own tokenizer.
- **MTP**: layers that predict further tokens, which the file has.
- **mmproj**: a class with a vision or audio part was also converted with `--mmproj` to Q8_0. "Answers" means that
  `llama-mtmd-cli` answered a question about an image or a sound with both files.
- **Q4_K_M in llama-cli**: whether llama.cpp's own llama-cli writes tokens with the file in Q4_K_M. Encoders write none.
- **Differences**: metadata and tensors that differ from the file of llama.cpp's converter. llmcli also writes values that
  llama.cpp assumes when they are missing, such as `vocab_size` and `expert_gating_func`.
  "Fails" means that llama.cpp's converter does not convert this checkpoint or its small tokenizer.

"""
NOT_COMPARED_START = """
## Not compared

llama.cpp's converter knows {} more classes of language models.

| Reason | Classes |
|---|---|
"""
ABSENT = "transformers has no such class"
LLMCLI = (sys.executable, "-m", "llmcli.app")
TIMEOUT_SECONDS = 600
# What transformers and llama-cpp-python raise for settings that do not fit together.
FAILURES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
            RuntimeError, TypeError, ValueError)  # fmt: skip
# The tokenizers of these checkpoints are unknown to llama.cpp's converter, which then stops.
UPSTREAM_PROGRAM = """
import runpy, sys
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# An error in the log of a program of llama.cpp, without its time, or a failed assertion
LOG_ERROR = re.compile(r"(?m)^(?:[\d.]+ E (?:\w+: )?|.*(?=GGML_ASSERT))(.*\S.*)")
FOLDER = re.compile(r"[^\s']*families-[^\s/]*/")  # of a case
# Keys that depend on the folder's name, the version or the tokenizer's proof.
OTHER_KEYS = re.compile(r"general\.|tokenizer\.|llmcli\.|GGUF\.")


@dataclass
class Row:
    """The results of one family. A field with a message says why there is no result."""

    family: str
    hf: str
    converter: str = ""
    architecture: str = ""
    nmse: float | str = ""
    same_tokens: str = ""
    tokenizer: str = ""
    mtp: str = ""
    llama_cli: str = ""
    mmproj: str = "-"
    upstream: str = ""


def main() -> None:
    """Convert and compare the families, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--bpe", type=Path)
    parser.add_argument("--llama-cli", type=Path)
    parser.add_argument("--llama-mtmd-cli", type=Path)
    parser.add_argument("--upstream", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, nargs="+")
    args = parser.parse_args()
    if args.page:
        if args.upstream is None:
            parser.error("--page needs --upstream")
        rows = read_rows(args.page)
        PAGE.write_text(format_page(rows, reasons_against(rows, args.upstream)))
        return
    transformers.utils.logging.set_verbosity_error()
    rows = []
    for case in selected_cases(args.only):
        with tempfile.TemporaryDirectory(prefix="families-") as folder:
            row = measure(case, Path(folder), args)
            if family_vision.has_part(case):
                row.mmproj = convert_vision(case, Path(folder), args)
        print(" | ".join(str(value) for value in asdict(row).values()), flush=True)
        rows.append(row)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    exact = [row for row in rows if isinstance(row.nmse, float) and row.nmse < 1e-6]
    native = [row for row in exact if row.converter == "native"]
    print(f"{len(rows)} families; NMSE < 1e-6: {len(exact)}, of them {len(native)} native")


def selected_cases(only: str) -> Sequence[families.Case]:
    """Return the first case of each class, native families first."""
    first: dict[str, families.Case] = {}
    for case in [*families.cases(), *llama_cpp_families.CASES]:
        first.setdefault(case.hf, case)
    return [case for case in first.values() if re.search(only, f"{case.name} {case.hf}")]


def read_rows(files: Sequence[Path]) -> list[Row]:
    """Return the compared rows of earlier runs: of each class that has a case, the last row."""
    last = {row["hf"]: Row(**row) for file in files for row in json.loads(file.read_text())}
    names = {case.hf for case in selected_cases("")}
    return [row for hf, row in last.items() if hf in names and isinstance(row.nmse, float)]


def reasons_against(rows: Sequence[Row], upstream: Path) -> dict[str, str]:
    """Return why a class has no row, for each class of language models in llama.cpp's converter.

    Raises LookupError for a class without a reason, or for one with a row and a reason.
    """
    classes = converter_classes.read_classes(upstream)
    if classes is None:
        raise LookupError(f"{upstream} has no table of classes")
    compared = {row.hf for row in rows}
    known = llama_cpp_families.NOT_COMPARED
    missing = {name: ABSENT for name in classes.text if not hasattr(transformers, name)}
    reasons = {name: reason for name, reason in (missing | known).items() if name not in compared}
    if wrong := {*known} & compared | {*classes.text} - compared - {*reasons}:
        raise LookupError(f"a row or a reason, not both: {', '.join(sorted(wrong))}")
    return reasons


def measure(case: families.Case, work: Path, args: argparse.Namespace) -> Row:
    """Return the row of a case."""
    row = Row(case.name.split(",")[0], case.hf)
    folder, out = work / "Tiny", work / "f32.gguf"
    is_native = case.hf in ARCHS
    try:
        if is_native and case.hf in predicting_checkpoint.CLASSES:
            predicting_checkpoint.build(case.hf, folder)
        else:
            build(case, folder, args.bpe)
    except FAILURES as error:
        row.nmse = f"transformers: {first_line(error)}"
        return row
    done = run(
        *LLMCLI, "quantize", folder, "--type", "F32", "-o", out, "--json", "-t", "1",
        "--accept-tokenizer-differences",
    )  # fmt: skip
    if done.returncode:
        row.nmse = last_line(done.stderr)
        return row
    row.converter = json.loads(done.stdout).get("converter", "")
    header = read_header.read_header(out)
    row.architecture = header.architecture
    row.tokenizer = describe_tokenizer(header)
    row.mtp = str(header.get_int("nextn_predict_layers") or "-")
    compare_outputs(row, out, folder, case.output)
    writes = case.output == "logits"
    row.llama_cli = answer(out, work / "q4.gguf", args.llama_cli) if writes else "-"
    if args.upstream and is_native:
        row.upstream = compare_upstream(header, folder, work / "upstream.gguf", args.upstream)
    return row


def build(case: families.Case, folder: Path, bpe: Path | None) -> None:
    """Write the checkpoint of a case, with the tokenizer `bpe` if its conversion needs that."""
    if case.hf in ARCHS or is_sentencepiece(case):
        bpe = None
    if bpe:
        added = len(family_vision.vision_of(case).tokens)
        size: dict[str, Any] = {"vocab_size": families.token_count(bpe) + added}
        if "text_config" in case.settings:
            size = {"text_config": size}
        case = replace(case, settings=family_vision.merge(case.settings, size))
    families.build(case, folder)
    if bpe:
        use_tokenizer(bpe, folder)
        family_vision.add_tokens(folder, family_vision.vision_of(case).tokens)


def convert_vision(case: families.Case, work: Path, args: argparse.Namespace) -> str:
    """Convert a checkpoint of the case with its vision or audio part, and return "written", "answers"
    if llama-mtmd-cli generates with the files and an image or a sound, or why there is no result.
    """
    if reason := family_vision.reason_against(case):
        return reason
    folder, model, mmproj, medium = (
        work / name for name in ("Vision", "Vision-Q8_0.gguf", "mmproj-Vision.gguf", "medium")
    )
    try:
        build(family_vision.change_case(case), folder, args.bpe)
        family_vision.complete_checkpoint(case, folder)
    except FAILURES as error:
        return f"transformers: {first_line(error)}"
    done = run(
        *LLMCLI, "quantize", folder, "--type", "Q8_0", "--mmproj", "-t", "1",
        "--accept-tokenizer-differences",
    )  # fmt: skip
    if done.returncode:
        return f"fails: {last_line(done.stderr).removeprefix('error: ')}"
    if not (model.exists() and mmproj.exists()):
        return "fails: a file is missing"
    if args.llama_mtmd_cli is None:
        return "written"
    option, content = family_vision.input_of(case)
    medium.write_bytes(content)
    done = run(
        args.llama_mtmd_cli, "-m", model, "--mmproj", mmproj, option, medium, "-p", "what",
        "-n", "4", "-t", "1", "-c", "1024", "--no-warmup", "--chat-template", "chatml",
    )  # fmt: skip
    if done.returncode == 0:
        return "answers"
    return f"llama-mtmd-cli fails: {find_error(done.stderr)}"


def describe_tokenizer(header: ModelHeader) -> str:
    """Return what the file records about its tokenizer's comparison."""
    counts = [
        getattr(header.metadata.get(key), "count", 0)
        for key in (DIFFERING_KEY, KNOWN_DIFFERENCES_KEY)
    ]
    if counts[0]:
        return "differs"
    return f"{counts[1]} known differences" if counts[1] else "equal"


def compare_outputs(row: Row, out: Path, folder: Path, output: str) -> None:
    """Set the error of the outputs (Case.output), and how many of the likeliest tokens are the same."""
    try:
        ours = families.ours(out, output=output)
        theirs = families.theirs(folder, output=output)
    except FAILURES as error:
        row.nmse = first_line(error)
        return
    row.nmse = float(f"{families.nmse(ours, theirs[:, : ours.shape[1]]):.1e}")
    if output != "logits":
        return
    equal, clear = families.agreement(ours, theirs)
    row.same_tokens = f"{equal}/{clear}"


def answer(floats: Path, out: Path, llama_cli: Path | None) -> str:
    """Quantize to Q4_K_M, and return whether llama-cli generates with the file."""
    if llama_cli is None:
        return "-"
    write.write_model(plan.plan_quantization(write.open_gguf(floats), "Q4_K_M"), out)
    done = run(
        llama_cli, "-m", out, "-p", "once", "-n", "8", "-t", "1", "-c", "256", "-st",
        "--no-warmup", "--jinja",
    )  # fmt: skip
    return "answers" if done.returncode == 0 else f"fails: {find_error(done.stderr)}"


def compare_upstream(header: ModelHeader, folder: Path, out: Path, upstream: Path) -> str:
    """Return how the file of llama.cpp's converter differs from a native one."""
    script = upstream / "convert_hf_to_gguf.py"
    done = run(
        sys.executable, "-c", UPSTREAM_PROGRAM, upstream, script, folder, "--outtype", "f32",
        "--outfile", out,
    )  # fmt: skip
    if done.returncode or not out.exists():
        return f"fails: {last_line(done.stderr)}"
    theirs = read_header.read_header(out)
    differences = [*key_differences(header, theirs), *tensor_differences(header, theirs)]
    return "; ".join(differences) or "equal"


def key_differences(ours: ModelHeader, theirs: ModelHeader) -> list[str]:
    """Return descriptions of metadata keys that differ."""
    found = []
    for key in sorted({*ours.metadata, *theirs.metadata}):
        values = [value_of(header, key) for header in (ours, theirs)]
        if not OTHER_KEYS.match(key) and values[0] != values[1]:
            found.append(f"{key}: {values[0]} and {values[1]}")
    return found


def value_of(header: ModelHeader, key: str) -> object:
    """Return a metadata value that can be compared: a list for an array, floats in float32."""
    value = header.metadata.get(key)
    if hasattr(value, "read_values"):
        return list(value.read_values())
    return float(np.float32(value)) if isinstance(value, float) else value


def tensor_differences(ours: ModelHeader, theirs: ModelHeader) -> list[str]:
    """Return descriptions of tensors that differ in presence, shape or values."""
    pairs = [{tensor.name: tensor for tensor in header.tensors} for header in (ours, theirs)]
    found = [f"only ours: {name}" for name in pairs[0].keys() - pairs[1].keys()]
    found += [f"only theirs: {name}" for name in pairs[1].keys() - pairs[0].keys()]
    for name in pairs[0].keys() & pairs[1].keys():
        arrays = []
        for tensor in (pairs[0][name], pairs[1][name]):
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset)
                arrays.append((tuple(tensor.shape), tensor.type, file.read(tensor.nbytes)))
        if arrays[0] != arrays[1]:
            found.append(f"{name}: {arrays[0][:2]} and {arrays[1][:2]}")
    return found


def is_sentencepiece(case: families.Case) -> bool:
    """Return whether llama.cpp's converter reads a SentencePiece model for the case."""
    return case.name in llama_cpp_families.SENTENCEPIECE


def use_tokenizer(source: Path, folder: Path) -> None:
    """Replace the tokenizer of a checkpoint."""
    for file in folder.glob("*token*"):
        file.unlink()
    families.copy_tokenizer(source, folder)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command on one thread, and return its output."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def format_page(rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    """Return the page with the table of all rows, and that of the reasons against other classes."""
    table = [
        "| Class | Architecture | Converter | Error | Tokenizer | MTP | mmproj | Q4_K_M in llama-cli "
        "| Differences |",
        "|---|---|---|--:|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.converter != "native", row.hf.lower())):
        fields = (
            row.hf,
            row.architecture,
            row.converter,
            f"{row.nmse:.1e}",
            row.tokenizer,
            row.mtp,
            row.mmproj,
            row.llama_cli,
        )
        cells = [FOLDER.sub("", field).replace("|", r"\|") for field in fields]
        table.append(f"| {' | '.join(cells)} | {shorten_differences(row.upstream)} |")
    exact = [row for row in rows if row.nmse < 1e-6]
    native = sum(row.converter == "native" for row in exact)
    summary = (
        f"{len(rows)} classes are compared. {len(exact)} of them have an error below 1e-6, "
        f"{native} of these natively. The others:\n\n"
    )
    for row in rows:
        if row not in exact:
            summary += f"- {row.hf}: {llama_cpp_families.DIFFERENT[row.hf]}.\n"
    summary += "\n"
    return PAGE_START + summary + "\n".join(table) + "\n" + format_reasons(reasons)


def format_reasons(reasons: Mapping[str, str]) -> str:
    """Return the table of classes that are not compared, with one row for each reason."""
    classes: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items(), key=lambda pair: pair[0].lower()):
        classes.setdefault(reason, []).append(name)
    table = [
        f"| {reason} | {', '.join(names)} |"
        for reason, names in sorted(classes.items(), key=lambda pair: len(pair[1]))
    ]
    return NOT_COMPARED_START.format(len(reasons)) + "\n".join(table) + "\n"


def shorten_differences(text: str) -> str:
    """Return the names of the keys and tensors that differ, once each."""
    if text.startswith("fails"):
        return "fails"
    names = []
    for part in filter(None, text.split("; ")):
        subject = part.split(": ")[0] if not part.startswith("only") else part
        name = re.sub(r"blk\.\d+\.", "", subject)
        name = name.partition(".")[2] if ": " in part and "blk" not in subject else name
        names.append(f"`{name}`" if not name.startswith("only") else name.replace(": ", " `") + "`")
    return ", ".join(dict.fromkeys(names)) if text != "equal" else "none"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with its class."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:100]}"


def find_error(log: str) -> str:
    """Return the first error in the log of a program of llama.cpp."""
    error = LOG_ERROR.search(log)
    return error[1].strip()[:160] if error else "no message"


def last_line(text: str) -> str:
    """Return the line of an error, or the last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), (lines or [""])[-1])[:160]


if __name__ == "__main__":
    main()
