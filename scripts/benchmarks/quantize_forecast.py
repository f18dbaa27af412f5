#!/usr/bin/env python3
"""Compare the forecast of `llmcli quantize` with the time and memory that it then takes.

usage: .venv/bin/python scripts/benchmarks/quantize_forecast.py FILE.gguf --moments FILE
       [--types Q4_K_M,Q3_K_M] [--threads 2] [--work FOLDER]

Each type is quantized by GPTQ in a process of its own. The script prints the seconds of the
forecast and of choosing codes, the memory of both (the largest resident set of the process), and
their ratios. Sizes below quant/quantize/cost_forecast.py's MIN_MULTIPLICATIONS have no forecast.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Parse the flags, quantize to each type and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--moments", type=Path, required=True)
    parser.add_argument("--types", default="Q4_K_M")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for the files; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        for kind in args.types.split(","):
            out = Path(folder, "out.gguf")
            command = [
                *(sys.executable, "-m", "llmcli.app", "quantize", str(args.file)),
                *("--type", kind, "--method", "gptq", "--moments", str(args.moments)),
                *("--threads", str(args.threads), "--json", "--force", "-o", str(out)),
            ]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
            assert child.stdout
            output = child.stdout.read()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                sys.exit(f"{kind}: exit {child.returncode}")
            document = json.loads(output)
            if not document["forecast"]:
                sys.exit(f"{args.file.name} {kind}: too small for a forecast")
            forecast, resident = document["forecast"], usage.ru_maxrss * 1024
            seconds, expected = document["elapsed_ms"] / 1000, forecast["elapsed_ms"] / 1000
            print(
                f"{args.file.name} {kind}: forecast {expected:.0f} s, of which factors "
                f"{forecast['factor_ms'] / 1000:.0f} s; took {seconds:.0f} s "
                f"({expected / seconds:.2f} of it); memory {forecast['memory_bytes'] / 2**30:.2f} "
                f"GiB, took {resident / 2**30:.2f} GiB ({forecast['memory_bytes'] / resident:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
