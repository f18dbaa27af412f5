"""Compare `llmcli eval` with llama-perplexity: the same model, base and text.

    .venv/bin/python scripts/reference/perplexity.py MODEL BASE --text FILE --llama-perplexity PATH
        [--chunks N] [-t N]

llama-perplexity runs twice: --kl-divergence-base writes the base's log-probabilities in 16 bits
each over a window of 16 nats (steps of 2.4e-4 nats); --kl-divergence reads them. llmcli uses
float32, so divergences may differ by the effect of these steps: about 1e-6 nats on average, more in
the smallest percentiles. If a token has less than e^-16 of the likeliest one's probability, their
second run uses that value: its perplexity of the base is then too low, and so are the ratio and
difference. Their first run has no such limit; its perplexity counts. The last line says whether the
mean divergence is within 1 % and both perplexities within their rounding.
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
    tool: Path, model: Path, base: Path, options: argparse.Namespace
) -> tuple[str, str, float, int]:
    """Return the output of both llama-perplexity runs, their seconds, and the bytes of the logits
    file.
    """
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder) / "base.kld"
        common = [
            "-f",
            str(options.text),
            "-c",
            str(options.ctx),
            "-t",
            str(options.threads),
            "--chunks",
            str(options.chunks or -1),
            "--kl-divergence-base",
            str(file),
        ]
        begun = time.perf_counter()
        alone = run([str(tool), "-m", str(base), *common])
        told = run([str(tool), "-m", str(model), *common, "--kl-divergence", *options.cache])
        return alone, told, time.perf_counter() - begun, file.stat().st_size


def ours(model: Path, base: Path, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Return the document of `llmcli eval`, and its seconds."""
    begun = time.perf_counter()
    chunks = ["--chunks", str(options.chunks)] if options.chunks else []
    told = run(
        [
            sys.executable,
            "-m",
            "llmcli.app",
            "eval",
            str(model),
            "--base",
            str(base),
            "--text",
            str(options.text),
            "--ctx",
            str(options.ctx),
            "-t",
            str(options.threads),
            *chunks,
            *options.cache,
            "--fresh",
            "--json",
        ]
    )
    return json.loads(told.splitlines()[-1]), time.perf_counter() - begun


def run(command: list[str]) -> str:
    """Run a command that must succeed; return its output and errors, the document last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stderr + done.stdout


def figure(text: str, pattern: str) -> float:
    """Return the number after a label."""
    found = re.search(pattern + NUMBER, text)
    assert found, (pattern, text[-3000:])
    return float(found[1])


def compare(alone: str, text: str, told: dict[str, Any]) -> bool:
    """Print the table; return whether the goals are met."""
    rows = [
        (name, figure(text, label), scale * told[key]["value"])
        for name, (label, key, scale) in LINES.items()
    ]
    rows.insert(
        1,
        (
            "perplexity of the base",
            figure(alone, "Final estimate: PPL ="),
            told["base_perplexity"]["value"],
        ),
    )
    kld, ranks = told["kl_divergence"], told["kl_divergence"]["percentiles"]
    rows += [
        ("maximum KLD", figure(text, "Maximum KLD:"), kld["maximum"]),
        *(
            (f"{rank} % KLD", figure(text, rf"\b{rank}%\s+KLD:"), ranks[f"{float(rank):g}"])
            for rank in PERCENTILES
        ),
        ("median KLD", figure(text, "Median  KLD:"), kld["median"]),
    ]
    print(f"{'':24}{'llama-perplexity':>18}{'llmcli eval':>16}{'difference':>14}")
    for name, one, other in rows:
        share = f"{(other - one) / one:+.4%}" if one else ""
        print(f"{name:24}{one:18.6f}{other:16.6f}{other - one:+14.6f}  {share}")
    by = {name: (one, other) for name, one, other in rows}
    close = [
        abs(other - one) <= 5.1e-5 + 1e-7 * one
        for one, other in (by["perplexity"], by["perplexity of the base"])
    ]
    one, other = by["mean KLD"]
    return all(close) and abs(other - one) <= 0.01 * one


def main() -> int:
    """Run both programs and report; return 1 if a goal is missed."""
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
    options = parser.parse_args()
    options.cache = (
        ["-ctk", options.cache_type, "-ctv", options.cache_type] if options.cache_type else []
    )
    told, seconds = ours(options.model, options.base, options)
    alone, text, their_seconds, nbytes = theirs(
        options.llama_perplexity, options.model, options.base, options
    )
    good = compare(alone, text, told)
    print(
        f"{told['chunks']} chunks of {told['n_ctx']}, {told['positions']} positions, {options.threads} threads"
    )
    print(
        f"llama-perplexity {their_seconds:.1f} s in two runs, {nbytes:,} bytes of logits; ours {seconds:.1f} s"
    )
    print("perplexities within their rounding, mean KLD within 1 %: " + ("yes" if good else "NO"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
