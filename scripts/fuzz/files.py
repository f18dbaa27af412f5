"""Mutate GGUF and safetensors files and read them in a process with limited memory and time.

    .venv/bin/python scripts/fuzz/files.py [--gguf MODEL.gguf] [--safetensors FILE] [--count 2000]
        [--seed 0]

Mutations are bit flips, cuts, wrong lengths, huge counts, and JSON values of a wrong kind. Reading
covers the header, its checks, every array and every tensor's bytes. Each file must be read
correctly or refused in one line. A crash, more than 5 seconds, or 2 GiB more than at the start are
failures. So is a refusal of a file that the formats' own readers accept (gguf_init_from_file of
libggml, the safetensors library); those must give the same names, shapes and bytes.
"""

import argparse
import hashlib
import json
import random
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.checkpoint import safetensors as safetensors_reader
from quant.errors import UserError
from quant.gguf.header import GgufArray, read_file_header
from quant.model_file import load_checks, read_header
from quant.native import ggml
from scripts.fuzz.header import mutate

STORIES = Path(__file__).parents[2] / "tests" / "data" / "stories260K"
HUGE = [0, 1, 7, 255, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    2**31,
    2**63,
    2**70,
    "",
    "F32",
    "F64",
    "BF16",
    [],
    [0],
    [[1]],
    {},
    "\x00",
]
SECONDS, MEMORY = 5.0, 2 << 30


@dataclass(frozen=True)
class Outcome:
    """One mutated file: the mutation and the verdict."""

    how: str
    verdict: str


# The worker: one line in, one line out.


def work() -> None:
    """Read the files named on stdin; print one JSON verdict per line."""
    ggml.open_library()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        path = Path(line.strip())
        try:
            found = read_gguf(path) if path.suffix == ".gguf" else read_safetensors(path)
            verdict = {"read": found}
        except UserError as refusal:
            told = str(refusal)
            clear = told and "\n" not in told and refusal.hint
            verdict = {"refused": told} if clear else {"died": f"unclear: {told!r}"}
        except MemoryError:
            verdict = {"died": "more than 2 GiB"}
        except Exception as error:  # noqa: BLE001 - any exception is a failure to report
            verdict = {"died": f"{type(error).__name__}: {error}"}
        print(json.dumps(verdict), flush=True)


def read_gguf(path: Path) -> dict[str, Any]:
    """Return the content of a GGUF: name -> [shape, type, digest]."""
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    for value in header.metadata.values():
        if isinstance(value, GgufArray):
            value.read_values()
    found = {}
    with path.open("rb") as stream:
        for tensor in header.tensors:
            stream.seek(tensor.offset)
            found[tensor.name] = [
                list(tensor.shape),
                tensor.type,
                _digest(stream.read(tensor.nbytes)),
            ]
    return found


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the content of a safetensors file: name -> [shape, dtype, digest]."""
    found = {}
    for tensor in safetensors_reader.read_safetensors(path):
        rows = 1
        for side in tensor.shape[:-1]:
            rows *= side
        found[tensor.name] = [
            list(tensor.shape),
            tensor.dtype,
            _digest(tensor.read(0, rows).tobytes()),
        ]
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# The reference readers.


def oracle_gguf(path: Path) -> bool:
    """Return whether ggml's reader accepts the header and every tensor is inside the file."""
    code = (
        "import sys, ctypes\n"
        "from quant.native import ggml\n"
        "lib = ggml.open_library()\n"
        "class P(ctypes.Structure): _fields_ = [('no_alloc', ctypes.c_bool), ('ctx', ctypes.c_void_p)]\n"
        "lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, P]; lib.gguf_init_from_file.restype = ctypes.c_void_p\n"
        "for name, kind in (('gguf_get_n_tensors', ctypes.c_int64), ('gguf_get_data_offset', ctypes.c_size_t)):\n"
        "    getattr(lib, name).argtypes = [ctypes.c_void_p]; getattr(lib, name).restype = kind\n"
        "for name in ('gguf_get_tensor_offset', 'gguf_get_tensor_size'):\n"
        "    getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_int64]\n"
        "    getattr(lib, name).restype = ctypes.c_size_t\n"
        "import os\n"
        "path = sys.argv[1]\n"
        "g = lib.gguf_init_from_file(path.encode(), P(True, None))\n"
        "if not g: sys.exit(3)\n"
        "size, at = os.path.getsize(path), lib.gguf_get_data_offset(g)\n"
        "fits = all(at + lib.gguf_get_tensor_offset(g, i) + lib.gguf_get_tensor_size(g, i) <= size\n"
        "           for i in range(lib.gguf_get_n_tensors(g)))\n"
        "sys.exit(0 if fits else 4)\n"
    )
    return (
        subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, check=False
        ).returncode
        == 0
    )


def reader_gguf(path: Path) -> dict[str, Any] | None:
    """Return what the gguf package reads, or None if it fails; it trusts its input."""
    import gguf

    try:
        found = gguf.GGUFReader(path).tensors
    except Exception:  # noqa: BLE001 - any exception is a refusal
        return None
    return {
        item.name: [
            [int(side) for side in item.shape],
            item.tensor_type.name,
            _digest(item.data.tobytes()),
        ]
        for item in found
    }


def oracle_safetensors(path: Path) -> dict[str, Any] | None:
    """Return what the safetensors library reads, or None if it refuses the file."""
    import safetensors

    try:
        found = safetensors.deserialize(path.read_bytes())
    except Exception:  # noqa: BLE001 - any exception is a refusal
        return None
    return {
        name: [list(item["shape"]), item["dtype"], _digest(bytes(item["data"]))]
        for name, item in found
    }


# Mutations.


def mutate_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a safetensors file with one mutation of its bytes or of its JSON, and its name."""
    length = int.from_bytes(data[:8], "little")
    how = rng.randrange(8)
    if how == 0:
        out, at = bytearray(data), rng.randrange(8 + length)
        out[at] ^= 1 << rng.randrange(8)
        return bytes(out), f"bit of byte {at}"
    if how == 1:
        cut = rng.randrange(len(data))
        return data[:cut], f"cut at {cut}"
    if how == 2:
        claimed = rng.choice([*HUGE, length - 1, length + 1, len(data)])
        return struct.pack("<Q", claimed & (2**64 - 1)) + data[8:], f"length = {claimed}"
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    if how == 3:
        items = list(header.items())
        rng.shuffle(items)
        header, told = dict(items), "keys in another order"
    elif how == 4:
        key = rng.choice(["dtype", "shape", "data_offsets"])
        entry[key] = rng.choice(ODD)
        told = f"{name}.{key} = {entry[key]!r}"
    elif how == 5:
        key, at = rng.choice(["shape", "data_offsets"]), rng.randrange(len(entry["shape"]))
        entry[key][at] = rng.choice([*HUGE, -1, 1.5, None, "7"])
        told = f"{name}.{key}[{at}] = {entry[key][at]!r}"
    elif how == 6:
        header["__metadata__"] = rng.choice([{}, {"format": "pt"}, {"a": "b" * 1000}])
        told = "other metadata"
    else:
        header[rng.choice(["", "a" * 5000, "../x", "x\x00y", name + ".2"])] = header.pop(name)
        told = f"{name} renamed"
    blob = json.dumps(header).encode()
    blob += b" " * rng.choice([0, -len(blob) % 8])
    return struct.pack("<Q", len(blob)) + blob + data[8 + length :], told


# The run.


class Worker:
    """A process that reads files; it is replaced when it dies or is too slow."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def verdict(self, file: Path) -> dict[str, Any]:
        """Return the verdict for one file."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{file}\n")
        began, told = time.monotonic(), ""
        if select.select([self.process.stdout], [], [], SECONDS + 20)[0]:
            told = self.process.stdout.readline()
        spent = time.monotonic() - began
        if told and spent <= SECONDS:
            return dict(json.loads(told))
        self.process.kill()
        code = self.process.wait()
        self._start()
        return {"died": f"{spent:.1f} s" if spent > SECONDS else f"the process, code {code}"}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def judge(file: Path, found: dict[str, Any]) -> str:
    """Return "read", "refused", or a description of the failure."""
    if "died" in found:
        return f"died: {found['died']}"
    if file.suffix == ".gguf":
        if "read" in found:
            theirs = reader_gguf(file)
            return (
                "read"
                if theirs in (None, found["read"])
                else "wrong: other names, shapes or bytes than gguf's"
            )
        # Files on which llama.cpp would abort later are refused although the container is valid
        # (load_checks).
        try:
            read_header.read_header(file)
        except UserError:
            return (
                f"wrong: ggml reads it, llmcli says {found['refused']}"
                if oracle_gguf(file)
                else "refused"
            )
        return "refused by load_checks"
    theirs = oracle_safetensors(file)
    if theirs is None:
        return "refused" if "refused" in found else "read although the library refuses it"
    if "read" in found:
        same = found["read"].keys() == theirs.keys() and all(
            found["read"][k] == theirs[k] for k in theirs
        )
        return "read" if same else "wrong: other names, shapes or bytes than the library's"
    unread = "is stored as" in found["refused"]
    return (
        "refused by dtype"
        if unread
        else f"wrong: the library reads it, llmcli says {found['refused']}"
    )


def run(gguf: Path, plain: Path, count: int, seed: int) -> list[Outcome]:
    """Mutate both files, `count` times in all."""
    rng, outcomes, worker = random.Random(seed), [], Worker()
    part, data, weights = read_file_header(gguf), gguf.read_bytes(), plain.read_bytes()
    fields = [(field.key, *field.raw, field.kind) for field in part.fields]
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            if index % 2:
                mutated, how = mutate(data, fields, part.data_offset, rng)
            else:
                mutated, how = mutate_safetensors(weights, rng)
            file = Path(folder) / f"{index}.{'gguf' if index % 2 else 'safetensors'}"
            file.write_bytes(mutated)
            outcomes.append(
                Outcome(f"{file.suffix[1:]} {index}: {how}", judge(file, worker.verdict(file)))
            )
            file.unlink()
    worker.close()
    return outcomes


def main() -> None:
    """Run and print the failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="a small model; default: stories260K in Q8_0")
    parser.add_argument("--safetensors", type=Path, default=STORIES / "model.safetensors")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work()
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf = asked.gguf or converted(Path(folder) / "stories.gguf")
        outcomes = run(gguf, asked.safetensors, asked.count, asked.seed)
    wrong = [
        outcome
        for outcome in outcomes
        if outcome.verdict.startswith(("died", "wrong", "read although"))
    ]
    for outcome in wrong:
        print(outcome.how, "|", outcome.verdict)
    for verdict, number in Counter(
        outcome.verdict.split(":")[0] for outcome in outcomes
    ).most_common():
        print(f"{number:6} {verdict}")
    raise SystemExit(bool(wrong))


def converted(out: Path) -> Path:
    """Convert stories260K to a GGUF."""
    from quant.convert import checkpoint_source
    from quant.quantize import plan, write

    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(STORIES), "Q8_0"), out
    )
    return out


if __name__ == "__main__":
    main()
