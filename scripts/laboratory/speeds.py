#!/usr/bin/env python3
"""Compare the objective of planning with measured speeds.

usage: .venv/bin/python scripts/laboratory/speeds.py MODEL ... [-t THREADS] [-d DEPTHS] [-r ROUNDS]

For each model and number of tokens in the cache, `llmcli bench` measures tokens per second, all of
them in turns. The estimate (planning/prediction/speed_estimate.py) takes the memory bandwidth of the machine
from the same measurements. It need not be exact, because it only ranks placements: what counts is
that the ratio of measured to estimated speed is about the same for all models.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.hardware.processor import read_processor
from llmcli.planning.machine import Machine
from llmcli.planning.prediction.cache_layout import cache_bytes_by_layer
from llmcli.planning.prediction.memory_prediction import distribute
from llmcli.planning.prediction.model_layout import read_layout
from llmcli.planning.prediction.speed_estimate import CACHE_FILL, seconds_per_token
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from quant.model_file.read_header import read_header

ROOT = Path(__file__).parents[2]
LLMCLI = (sys.executable, "-m", "llmcli.app")  # of this checkout
GENERATED_TOKENS = 32


def measure(model: str, depth: int, threads: int) -> dict[str, float | str]:
    """Return the measured tokens per second, the bandwidth of the machine, and the file."""
    words = f"bench {model} -p 0 -n {GENERATED_TOKENS} -d {depth} -r 1 -t {threads} --json"
    done = subprocess.run(
        [*LLMCLI, *words.split(), "--no-history"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    row = json.loads(done.stdout)[0]
    return {
        "speed": row["avg_ts"],
        "bandwidth": row["read_bandwidth_bytes_per_second"] or 0.0,
        "file": row["model_filename"],
    }


def estimate(file: Path, depth: int, bandwidth: float) -> float:
    """Return the estimated tokens per second with `depth` tokens in the cache."""
    header = read_header(file)
    layout = read_layout(header)
    n_ctx = round((depth + GENERATED_TOKENS / 2) / CACHE_FILL)
    cache = cache_bytes_by_layer(header, ContextOptions(n_ctx)) or (0,) * len(layout.layers)
    distribution = distribute(ON_HOST, len(layout.layers), ())
    machine = Machine(read_processor(), None, bandwidth)
    return 1 / seconds_per_token(layout, machine, distribution, cache)


def main() -> None:
    """Measure all models in turns, and print measured and estimated speeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("-t", "--threads", type=int, default=read_processor().usable_cores)
    parser.add_argument("-d", "--depths", default="0,2048")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    args = parser.parse_args()
    cases = [(model, int(depth)) for model in args.models for depth in args.depths.split(",")]
    runs = [[measure(*case, args.threads) for case in cases] for _ in range(args.rounds)]
    bandwidth = statistics.median(float(row["bandwidth"]) for rows in runs for row in rows)
    print(f"{args.threads} threads; memory is read at {bandwidth / 1e9:.1f} GB/s")
    print(f"{'model':<24}{'depth':>7}{'measured':>10}{'spread':>9}{'estimate':>10}{'ratio':>7}")
    for index, (model, depth) in enumerate(cases):
        speeds = [float(rows[index]["speed"]) for rows in runs]
        speed = statistics.median(speeds)
        expected = estimate(Path(str(runs[0][index]["file"])), depth, bandwidth)
        spread = (max(speeds) - min(speeds)) / speed
        print(
            f"{model:<24}{depth:>7}{speed:>10.1f}{spread:>9.0%}{expected:>10.1f}"
            f"{speed / expected:>7.2f}"
        )


if __name__ == "__main__":
    main()
