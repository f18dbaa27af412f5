#!/usr/bin/env python3
"""Play a chat with undo, edits, branches and other answers, and count what is computed again.

usage: .venv/bin/python scripts/reference/turns.py MODEL.gguf [--turns 20] [--prompt 700]
       [--ctx 4096] [--reproducible]

Texts are random tokens. The script prints for each kind of turn how many tokens its prompts added
and how many were computed, and the bytes of checkpoints and states. With --reproducible it also
compares the logits of every turn, bit for bit, with those of a context that computes the whole
prompt. The exit code is 1 if a turn computes more than its new tokens, or if logits differ. In the
reproducible mode, branches of a model with a sliding window are computed again; they do not count.
States are copied whatever it costs: by measured cost, computing a few tokens can be faster.
"""

import argparse
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.runtime.kv_cache import offload, offload_store
from tests.runtime.test_turns_without_prefill import Step, open_small, play

HOST_BYTES = 2 << 30


def main() -> int:
    """Play the turns and print; return 1 if one computes too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=700)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--reproducible", action="store_true")
    args = parser.parse_args()
    offload.is_worth_storing = offload_store.is_worth_restoring = lambda cost: True
    steps: dict[str, list[Step]] = defaultdict(list)
    with ExitStack() as stack:
        runners = [
            stack.enter_context(open_small(args.model, host_bytes, args.reproducible, args.ctx))
            for host_bytes in (HOST_BYTES, 0)
        ]
        fresh = runners[1] if args.reproducible else None
        for step in play(runners[0], fresh, args.turns, args.prompt):
            steps[step.kind].append(step)
        report = runners[0].kv_report()
        store = runners[0].engine.scheduler.offload_store
        checkpoints = runners[0].engine.ledger.checkpoints
        is_complete = runners[0].context.has_complete_states
        print(
            f"{len(checkpoints)} checkpoints, {checkpoints.nbytes:,} bytes; states "
            f"{store.idle_bytes:,} bytes; cache predicted {report.predicted_bytes}, allocated "
            f"{report.allocated_bytes}"
        )
    failed = False
    for kind, of_kind in steps.items():
        n_new, n_computed = (
            sum(getattr(step, name) for step in of_kind) for name in ("n_new", "n_computed")
        )
        n_different = sum(step.is_equal is False for step in of_kind)
        is_counted = is_complete or kind in ("new", "continue", "again")
        failed |= bool(n_different) or (is_counted and n_computed > n_new)
        compared = f", {n_different} differ" if args.reproducible else ""
        print(f"{kind:9} {len(of_kind)} turns: {n_new} new, {n_computed} computed{compared}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
