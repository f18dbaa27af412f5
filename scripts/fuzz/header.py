"""Mutate the header of a GGUF file, and check that files that pass our checks do not crash
llama.cpp.

usage: .venv/bin/python scripts/fuzz/header.py MODEL.gguf [--count 500] [--seed 0]

Mutations are bit flips, numbers at random offsets, cuts, and changed fields within the header. The
files that read_header and check_loadable (quant/model_file) accept are loaded by llama.cpp in a
separate process. If one ends the process, a check is missing. The script prints each such mutation
and a summary, and exits with 1 if there is one.
"""

import argparse
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from quant.errors import UserError
from quant.gguf.header import SCALAR_CODES, TYPE_NAMES, read_file_header
from quant.model_file import load_checks, read_header

NUMBERS = [
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    31,
    33,
    63,
    127,
    255,
    256,
    512,
    513,
    4096,
    65535,
    1 << 20,
    1 << 24,
    2**31 - 1,
    2**32 - 1,
]
WORKER = """
import os, sys, ctypes
os.environ["GGML_NO_BACKTRACE"] = "1"
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
import llama_cpp as l
from llmcli.runtime.binding.contract import set_fields
quiet = l.llama_log_callback(lambda level, text, data: None)
l.llama_log_set(quiet, None)
l.llama_backend_init()
for line in sys.stdin:
    path = line.strip().encode()
    for vocab_only in (True, False):
        params = l.llama_model_default_params()
        with open(path, "rb") as file:
            repack = b"attn_k_b" not in file.read(1 << 20)  # as llmcli opens it
        set_fields(params, vocab_only=vocab_only, use_extra_bufts=repack)
        model = l.llama_model_load_from_file(path, params)
        if not model:
            continue
        vocab = l.llama_model_get_vocab(model)
        ids = (ctypes.c_int32 * 64)()
        count = l.llama_tokenize(vocab, b"once upon a w1\\n", 15, ids, 64, True, True)
        piece = ctypes.create_string_buffer(64)
        for i in range(max(count, 0)):
            l.llama_token_to_piece(vocab, ids[i], piece, 64, 0, True)
        if not vocab_only:
            settings = l.llama_context_default_params()
            set_fields(settings, n_ctx=64, n_batch=64, n_threads=1, n_threads_batch=1)
            context = l.llama_init_from_model(model, settings)
            if context:
                tokens = (ctypes.c_int32 * 2)(1, 1)
                l.llama_decode(context, l.llama_batch_get_one(tokens, 2))
                l.llama_free(context)
        l.llama_model_free(model)
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """One mutated file. `verdict`: "refused" by our checks, "survived" in llama.cpp, or "died" with
    the exit code of the process.
    """

    mutation: str
    verdict: str


def mutate(
    data: bytes, fields: list[tuple[str, int, int, str]], end: int, rng: random.Random
) -> tuple[bytes, str]:
    """Return the bytes of a GGUF file with one mutation of the header, and a description of it.

    `fields`: (key, offset after the key, offset after the value, type name) of the metadata. `end`:
    offset after the header.
    """
    mutated, kind_of_mutation = bytearray(data), rng.randrange(8)
    if kind_of_mutation == 0:
        at = rng.randrange(end)
        mutated[at] ^= 1 << rng.randrange(8)
        return bytes(mutated), f"bit of byte {at}"
    if kind_of_mutation == 1:
        at = rng.randrange(end)
        mutated[at] = rng.randrange(256)
        return bytes(mutated), f"byte {at} = {mutated[at]}"
    if kind_of_mutation == 2:
        cut = rng.randrange(len(data))
        return bytes(mutated[:cut]), f"cut at {cut}"
    if kind_of_mutation == 3:
        at = rng.randrange(0, end - 8)
        struct.pack_into("<I", mutated, at, rng.choice(NUMBERS))
        return bytes(mutated), f"u32 at {at}"
    key, first, last, kind = rng.choice(fields)
    code = next(
        (SCALAR_CODES[n] for n, name in TYPE_NAMES.items() if name == kind and n in SCALAR_CODES),
        None,
    )
    if code and code in "BbHhIiQq":
        value = rng.choice(NUMBERS) & ((1 << (8 * struct.calcsize(code) - code.islower())) - 1)
        struct.pack_into("<" + code, mutated, last - struct.calcsize("<" + code), value)
        return bytes(mutated), f"{key} = {value}"
    if code and code in "fd":
        value = rng.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 1e-30])
        struct.pack_into("<" + code, mutated, last - struct.calcsize("<" + code), value)
        return bytes(mutated), f"{key} = {value}"
    if kind_of_mutation < 6:  # rename the key, keeping its length
        at = first - 1
        mutated[at] ^= 1
        return bytes(mutated), f"{key} renamed"
    at = rng.randrange(first, last)
    mutated[at] = rng.randrange(256)
    return bytes(mutated), f"{key}: byte {at - first} = {mutated[at]}"


def run(model: Path, count: int, seed: int) -> list[Outcome]:
    """Mutate the file `count` times, and load every file that our checks accept with llama.cpp."""
    header, data = read_file_header(model), model.read_bytes()
    fields = [(field.key, *field.raw, field.kind) for field in header.fields]
    rng, outcomes = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        accepted = []
        for index in range(count):
            mutated, mutation = mutate(data, fields, header.data_offset, rng)
            file = Path(folder) / f"{index}.gguf"
            file.write_bytes(mutated)
            try:
                load_checks.check_loadable(read_header.read_header(file))
            except UserError:
                outcomes.append(Outcome(mutation, "refused"))
                file.unlink()
            else:
                accepted.append((file, mutation))
        outcomes += list(_load_all(accepted))
    return outcomes


def _load_all(files: list[tuple[Path, str]]) -> list[Outcome]:
    """Load (path, mutation) pairs with llama.cpp in one process. After a crash, continue with the
    next file in a new process.
    """
    outcomes, index = [], 0
    while index < len(files):
        text = "".join(f"{file}\n" for file, _ in files[index:])
        survived, ending = _load_in_process(text, seconds=120 + len(files))
        outcomes += [Outcome(name, "survived") for _, name in files[index : index + survived]]
        index += survived
        if index < len(files):
            outcomes.append(Outcome(files[index][1], f"died {ending}"))
            index += 1
    return outcomes


def _load_in_process(text: str, seconds: float) -> tuple[int, str]:
    """Let a process load the files whose paths are the lines of `text`. Return the number of files
    that it survived, and a description of its end. `seconds` is its time limit.
    """
    command = [sys.executable, "-c", WORKER]
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as timeout:
        return (timeout.stdout or b"").count(b"done"), "it hangs"
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return done.stdout.count(b"done"), f"{done.returncode}: {last[0][-150:]}"


def main() -> None:
    """Parse the flags, run, and print the crashes and the counts; exit with 1 on a crash."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes = run(args.model, args.count, args.seed)
    for outcome in outcomes:
        if outcome.verdict.startswith("died"):
            print(outcome.mutation, "|", outcome.verdict)
    print(Counter(outcome.verdict.split()[0] for outcome in outcomes))
    raise SystemExit(any(outcome.verdict.startswith("died") for outcome in outcomes))


if __name__ == "__main__":
    main()
