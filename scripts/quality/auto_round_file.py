#!/usr/bin/env python3
"""Make a GGUF file with AutoRound, for the rows of another program in compare.py's table.

usage: .venv/bin/python scripts/quality/auto_round_file.py CHECKPOINT OUT.gguf --type Q4_K_M
       --text FILE --python VENV/bin/python [--recipe light] [--samples 128] [--tokens 512]
       [--pre-tokenizer NAME]

CHECKPOINT is a Hugging Face folder. AutoRound (the package auto-round, which is not one of this
project's dependencies) runs by the interpreter of --python on the CPU. It is calibrated with
passages of the text, evenly spread. Its converter refuses tokenizers that it does not know, such as
those of train_teacher.py; --pre-tokenizer is the name that it writes instead, as in the GGUF file of
the original. The script prints the argument of compare.py's --made.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# the functions of auto_round.__main__ by recipe
RECIPES = {"light": "run_light", "default": "run", "best": "run_best"}
# what --python runs: the function of a recipe, with a fixed name of the pre-tokenizer if one is given
LAUNCHER = """
import sys
from auto_round import __main__
recipe, name = sys.argv.pop(1), sys.argv.pop(1)
if name:
    from auto_round.export.export_to_gguf import llama_cpp_conversion

    load = llama_cpp_conversion._import_conversion_from

    def load_with_name(*args):
        context = load(*args)
        from conversion.base import TextModel
        TextModel.get_vocab_base_pre = lambda self, tokenizer: name
        return context

    llama_cpp_conversion._import_conversion_from = load_with_name
sys.exit(getattr(__main__, recipe)())
"""
TOKEN_CHARS = 8  # more characters than a token has, so that passages fill their tokens


def main() -> None:
    """Parse the flags, run AutoRound and move its file to OUT.gguf."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--recipe", choices=RECIPES, default="light")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pre-tokenizer", default="", metavar="NAME")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        samples = Path(folder, "samples.jsonl")
        passages = spread_passages(args.text.read_text(), args.samples, args.tokens * TOKEN_CHARS)
        samples.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
        command = [
            *(str(args.python), "-c", LAUNCHER, RECIPES[args.recipe], args.pre_tokenizer),
            *("--model", str(args.checkpoint), "--device", "cpu"),
            *("--format", f"gguf:{args.type.lower()}", "--output_dir", f"{folder}/out"),
            *("--dataset", str(samples), "--nsamples", str(args.samples)),
            *("--seqlen", str(args.tokens)),
        ]
        started = time.monotonic()
        done = subprocess.run(command, check=False)
        seconds = time.monotonic() - started
        files = [*Path(folder, "out").rglob("*.gguf")]
        if done.returncode or len(files) != 1:
            sys.exit(f"AutoRound ended with {done.returncode} and wrote {len(files)} GGUF files")
        files[0].replace(args.out)
    print(f"AutoRound {args.recipe}={args.type}={seconds:.0f}={args.out}")


def spread_passages(text: str, count: int, chars: int) -> list[str]:
    """Return `count` passages of `chars` characters whose starts are spread evenly over the text."""
    last = max(0, len(text) - chars)
    starts = [number * last // max(1, count - 1) for number in range(count)]
    return [text[start : start + chars] for start in starts]


if __name__ == "__main__":
    main()
