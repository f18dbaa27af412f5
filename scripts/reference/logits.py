#!/usr/bin/env python3
"""Compare the logits of every family's tiny random checkpoints: llama.cpp (converted) and
transformers.

usage: .venv/bin/python scripts/reference/logits.py [WORD]     only cases whose name contains WORD

Float32 on both sides, no flash attention, 320 positions. For each case the script prints the
normalized mean squared error, and how many positions have the same likeliest token among those
where the reference's first two differ by more than 1e-4.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.quant import families


def main() -> None:
    """Measure and print."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    for case in families.cases():
        if word not in case.name:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder, out = families.build(case, Path(place) / "model"), Path(place) / "model.gguf"
            write.write_model(
                plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out
            )
            ours, theirs = families.ours(out), families.theirs(folder)
        same, clear = families.agreement(ours, theirs)
        print(
            f"{case.name:40} NMSE {families.nmse(ours, theirs):.1e}   argmax {same}/{clear}",
            flush=True,
        )


if __name__ == "__main__":
    main()
