"""Compare the figures of `llmcli eval` and llama-perplexity for the same model, base and text.

usage: .venv/bin/python scripts/reference/perplexity.py MODEL BASE --text FILE
       --llama-perplexity PATH [--chunks N] [-t N]

llama-perplexity runs twice. The first run (--kl-divergence-base) writes the log-probabilities of
the base model to a file, in 16 bits each over a range of 16 nats (steps of 2.4e-4 nats). The second
run (--kl-divergence) reads them. llmcli uses float32, so divergences may differ by the effect of
the rounding: about 1e-6 nats on average, and more in the smallest percentiles.

The file has no probabilities below e^-16 times the likeliest token's. For such tokens the second
run uses that limit, so its perplexity of the base is too low, and its ratio and difference are
wrong, too. The first run has no such limit, and its perplexity of the base is compared. The last
line says whether the mean divergence is within 1 % and both perplexities are within their rounding.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUMBER = r"\s*(-?[\d.]+)"
# Figure -> (label in llama-perplexity's output, key of `llmcli eval --json`, factor of our value).
LINES = {
    "perplexity": (r"Mean PPL\(Q\)\s*:", "perplexity", 1),
    "base's, with the limit": (r"Mean PPL\(base\)\s*:", "base_perplexity", 1),
    "ratio": (r"Mean PPL\(Q\)/PPL\(base\)\s*:", "perplexity_ratio", 1),
    "ln ratio": (r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:", "ln_perplexity_ratio", 1),
    "difference": (r"Mean PPL\(Q\)-PPL\(base\)\s*:", "perplexity_difference", 1),
    "mean KLD": (r"Mean    KLD:", "kl_divergence", 1),
    "mean Δp %": (r"Mean    Δp:", "delta_p", 100),
    "RMS Δp %": (r"RMS Δp\s*:", "rms_delta_p", 100),
    "same top %": (r"Same top p:", "same_top", 100),
}
PERCENTILES = ("99.9", "99.0", "95.0", "90.0", "10.0", "5.0", "1.0", "0.1")


def theirs(
    tool: Path, model: Path, base: Path, args: argparse.Namespace
) -> tuple[str, str, float, int]:
    """Run llama-perplexity twice. Return the output of the first run (on the base), the output of
    the second run, the seconds of both, and the bytes of the file between them.
    """
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = Path(folder) / "base.kld"
        common = [
            "-f",
            str(args.text),
            "-c",
            str(args.ctx),
            "-t",
            str(args.threads),
            "--chunks",
            str(args.chunks or -1),
            "--kl-divergence-base",
            str(file),
        ]
        began = time.perf_counter()
        base_output = run([str(tool), "-m", str(base), *common])
        output = run([str(tool), "-m", str(model), *common, "--kl-divergence", *args.cache])
        return base_output, output, time.perf_counter() - began, file.stat().st_size


def ours(model: Path, base: Path, args: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Run `llmcli eval`; return its JSON document and its seconds."""
    began = time.perf_counter()
    chunks = ["--chunks", str(args.chunks)] if args.chunks else []
    output = run(
        [
            sys.executable,
            "-m",
            "llmcli.app",
            "eval",
            str(model),
            "--base",
            str(base),
            "--text",
            str(args.text),
            "--ctx",
            str(args.ctx),
            "-t",
            str(args.threads),
            *chunks,
            *args.cache,
            "--fresh",
            "--json",
        ]
    )
    return json.loads(output.splitlines()[-1]), time.perf_counter() - began


def run(command: list[str]) -> str:
    """Run a command; return its stderr followed by its stdout, so that a JSON document is the last
    line. Exits with its stderr if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stderr + done.stdout


def figure(text: str, pattern: str) -> float:
    """Return the number that follows a label in llama-perplexity's output. `pattern`: a regular
    expression of the label.
    """
    match = re.search(pattern + NUMBER, text)
    assert match, (pattern, text[-3000:])
    return float(match[1])


def compare(base_output: str, text: str, document: dict[str, Any]) -> bool:
    """Print a table of all figures; return whether mean divergence and perplexities agree.
    `base_output`, `text`: output of llama-perplexity's two runs. `document`: of `llmcli eval`.
    """
    rows = [
        (name, figure(text, label), scale * document[key]["value"])
        for name, (label, key, scale) in LINES.items()
    ]
    rows.insert(
        1,
        (
            "perplexity of the base",
            figure(base_output, "Final estimate: PPL ="),
            document["base_perplexity"]["value"],
        ),
    )
    kld, ranks = document["kl_divergence"], document["kl_divergence"]["percentiles"]
    rows += [
        ("maximum KLD", figure(text, "Maximum KLD:"), kld["maximum"]),
        *(
            (f"{rank} % KLD", figure(text, rf"\b{rank}%\s+KLD:"), ranks[f"{float(rank):g}"])
            for rank in PERCENTILES
        ),
        ("median KLD", figure(text, "Median  KLD:"), kld["median"]),
    ]
    print(f"{'':24}{'llama-perplexity':>18}{'llmcli eval':>16}{'difference':>14}")
    for name, their_value, our_value in rows:
        share = f"{(our_value - their_value) / their_value:+.4%}" if their_value else ""
        print(
            f"{name:24}{their_value:18.6f}{our_value:16.6f}{our_value - their_value:+14.6f}  {share}"
        )
    values = {name: (their_value, our_value) for name, their_value, our_value in rows}
    within_rounding = [
        abs(our_value - their_value) <= 5.1e-5 + 1e-7 * their_value
        for their_value, our_value in (values["perplexity"], values["perplexity of the base"])
    ]
    their_value, our_value = values["mean KLD"]
    return all(within_rounding) and abs(our_value - their_value) <= 0.01 * their_value


def main() -> int:
    """Parse the flags, run both programs and print; return 1 if the figures do not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama-perplexity", type=Path, required=True, metavar="PATH")
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="folder for llama-perplexity's temporary file of logits"
    )
    parser.add_argument(
        "--cache-type", metavar="TYPE", help="of the model's K and V; the base has f16"
    )
    args = parser.parse_args()
    args.cache = ["-ctk", args.cache_type, "-ctv", args.cache_type] if args.cache_type else []
    document, seconds = ours(args.model, args.base, args)
    base_output, text, their_seconds, nbytes = theirs(
        args.llama_perplexity, args.model, args.base, args
    )
    passed = compare(base_output, text, document)
    print(
        f"{document['chunks']} chunks of {document['n_ctx']}, {document['positions']} positions, {args.threads} threads"
    )
    print(
        f"llama-perplexity {their_seconds:.1f} s in two runs, {nbytes:,} bytes of logits; ours {seconds:.1f} s"
    )
    print("perplexities within their rounding, mean KLD within 1 %: " + ("yes" if passed else "NO"))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
