"""Mutate GGUF and safetensors files, and read them in a process with limited memory and time.

usage: .venv/bin/python scripts/fuzz/files.py [--gguf MODEL.gguf] [--safetensors FILE]
       [--count 2000] [--seed 0]

Mutations are bit flips, cuts, wrong lengths, huge counts, and JSON values of a wrong type. Reading
includes the header, its checks, every array and every tensor's bytes. Each file must be read
correctly or refused with a message of one line. It is a failure if the reader crashes, needs more
than 5 seconds, or needs 2 GiB more memory than at its start. It is also a failure if the formats'
own readers (gguf_init_from_file of libggml, the safetensors library) accept a file that is refused
here, or read other names, shapes or bytes.
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
HUGE_NUMBERS = [
    0,
    1,
    7,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
ODD_VALUES: list[Any] = [
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
    """One mutated file. `mutation`: format, number and description. `verdict`: see `verdict_of`."""

    mutation: str
    verdict: str


# The worker process reads one path per line of stdin and prints one line of JSON for it.


def run_worker() -> None:
    """Read the files whose paths come on stdin. For each, print {"read": content}, {"refused":
    message} or {"died": reason}. The memory of the process is limited.
    """
    ggml.open_library()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        path = Path(line.strip())
        try:
            content = read_gguf(path) if path.suffix == ".gguf" else read_safetensors(path)
            verdict = {"read": content}
        except UserError as refusal:
            message = str(refusal)
            is_clear = message and "\n" not in message and refusal.hint
            verdict = {"refused": message} if is_clear else {"died": f"unclear: {message!r}"}
        except MemoryError:
            verdict = {"died": "more than 2 GiB"}
        except Exception as error:  # noqa: BLE001 - any exception is a failure to report
            verdict = {"died": f"{type(error).__name__}: {error}"}
        print(json.dumps(verdict), flush=True)


def read_gguf(path: Path) -> dict[str, Any]:
    """Return the tensors of a GGUF file: name -> [shape, type, digest of the bytes]. Raises
    UserError if the file is refused.
    """
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    for value in header.metadata.values():
        if isinstance(value, GgufArray):
            value.read_values()
    tensors = {}
    with path.open("rb") as stream:
        for tensor in header.tensors:
            stream.seek(tensor.offset)
            tensors[tensor.name] = [
                list(tensor.shape),
                tensor.type,
                _digest(stream.read(tensor.nbytes)),
            ]
    return tensors


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file: name -> [shape, dtype, digest of the bytes]. Raises
    UserError if the file is refused.
    """
    tensors = {}
    for tensor in safetensors_reader.read_safetensors(path):
        rows = 1
        for side in tensor.shape[:-1]:
            rows *= side
        tensors[tensor.name] = [
            list(tensor.shape),
            tensor.dtype,
            _digest(tensor.read(0, rows).tobytes()),
        ]
    return tensors


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# The reference readers.


def ggml_accepts(path: Path) -> bool:
    """Return whether ggml's reader accepts the header, and every tensor is inside the file. The
    reader runs in a process, because it may crash.
    """
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


def read_with_gguf_package(path: Path) -> dict[str, Any] | None:
    """Return the tensors that the gguf package reads, in the form of `read_gguf`; None if it fails.
    The package does not check its input, so a failure means nothing.
    """
    import gguf

    try:
        tensors = gguf.GGUFReader(path).tensors
    except Exception:  # noqa: BLE001 - any exception is a refusal
        return None
    return {
        item.name: [
            [int(side) for side in item.shape],
            item.tensor_type.name,
            _digest(item.data.tobytes()),
        ]
        for item in tensors
    }


def read_with_safetensors_library(path: Path) -> dict[str, Any] | None:
    """Return the tensors that the safetensors library reads, in the form of `read_safetensors`;
    None if it refuses the file.
    """
    import safetensors

    try:
        tensors = safetensors.deserialize(path.read_bytes())
    except Exception:  # noqa: BLE001 - any exception is a refusal
        return None
    return {
        name: [list(item["shape"]), item["dtype"], _digest(bytes(item["data"]))]
        for name, item in tensors
    }


# Mutations.


def mutate_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return the bytes of a safetensors file with one mutation of its bytes or of its JSON header,
    and a description of the mutation.
    """
    length = int.from_bytes(data[:8], "little")
    kind = rng.randrange(8)
    if kind == 0:
        mutated, at = bytearray(data), rng.randrange(8 + length)
        mutated[at] ^= 1 << rng.randrange(8)
        return bytes(mutated), f"bit of byte {at}"
    if kind == 1:
        cut = rng.randrange(len(data))
        return data[:cut], f"cut at {cut}"
    if kind == 2:
        claimed = rng.choice([*HUGE_NUMBERS, length - 1, length + 1, len(data)])
        return struct.pack("<Q", claimed & (2**64 - 1)) + data[8:], f"length = {claimed}"
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    if kind == 3:
        items = list(header.items())
        rng.shuffle(items)
        header, name_of_mutation = dict(items), "keys in another order"
    elif kind == 4:
        key = rng.choice(["dtype", "shape", "data_offsets"])
        entry[key] = rng.choice(ODD_VALUES)
        name_of_mutation = f"{name}.{key} = {entry[key]!r}"
    elif kind == 5:
        key, at = rng.choice(["shape", "data_offsets"]), rng.randrange(len(entry["shape"]))
        entry[key][at] = rng.choice([*HUGE_NUMBERS, -1, 1.5, None, "7"])
        name_of_mutation = f"{name}.{key}[{at}] = {entry[key][at]!r}"
    elif kind == 6:
        header["__metadata__"] = rng.choice([{}, {"format": "pt"}, {"a": "b" * 1000}])
        name_of_mutation = "other metadata"
    else:
        header[rng.choice(["", "a" * 5000, "../x", "x\x00y", name + ".2"])] = header.pop(name)
        name_of_mutation = f"{name} renamed"
    blob = json.dumps(header).encode()
    blob += b" " * rng.choice([0, -len(blob) % 8])
    return struct.pack("<Q", len(blob)) + blob + data[8 + length :], name_of_mutation


# The run.


class Worker:
    """The process that reads files. It is started again when it dies or is too slow."""

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
        """Let the process read one file; return its line of JSON, or {"died": reason}."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{file}\n")
        began, answer = time.monotonic(), ""
        if select.select([self.process.stdout], [], [], SECONDS + 20)[0]:
            answer = self.process.stdout.readline()
        seconds = time.monotonic() - began
        if answer and seconds <= SECONDS:
            return dict(json.loads(answer))
        self.process.kill()
        code = self.process.wait()
        self._start()
        return {"died": f"{seconds:.1f} s" if seconds > SECONDS else f"the process, code {code}"}

    def close(self) -> None:
        """End the process by closing its stdin."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def verdict_of(file: Path, result: dict[str, Any]) -> str:
    """Compare the worker's result with the formats' own readers. Return "read", "refused" (with a
    reason), or a description of the failure.
    """
    if "died" in result:
        return f"died: {result['died']}"
    if file.suffix == ".gguf":
        if "read" in result:
            theirs = read_with_gguf_package(file)
            return (
                "read"
                if theirs in (None, result["read"])
                else "wrong: other names, shapes or bytes than gguf's"
            )
        # load_checks also refuses valid GGUF files on which llama.cpp would abort later.
        try:
            read_header.read_header(file)
        except UserError:
            return (
                f"wrong: ggml reads it, llmcli says {result['refused']}"
                if ggml_accepts(file)
                else "refused"
            )
        return "refused by load_checks"
    theirs = read_with_safetensors_library(file)
    if theirs is None:
        return "refused" if "refused" in result else "read although the library refuses it"
    if "read" in result:
        same = result["read"].keys() == theirs.keys() and all(
            result["read"][k] == theirs[k] for k in theirs
        )
        return "read" if same else "wrong: other names, shapes or bytes than the library's"
    unsupported_dtype = "is stored as" in result["refused"]
    return (
        "refused by dtype"
        if unsupported_dtype
        else f"wrong: the library reads it, llmcli says {result['refused']}"
    )


def run(gguf: Path, safetensors: Path, count: int, seed: int) -> list[Outcome]:
    """Mutate the two files in turn, `count` times in total, and read each mutated file."""
    rng, outcomes, worker = random.Random(seed), [], Worker()
    header, data, weights = read_file_header(gguf), gguf.read_bytes(), safetensors.read_bytes()
    fields = [(field.key, *field.raw, field.kind) for field in header.fields]
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            if index % 2:
                mutated, mutation = mutate(data, fields, header.data_offset, rng)
            else:
                mutated, mutation = mutate_safetensors(weights, rng)
            file = Path(folder) / f"{index}.{'gguf' if index % 2 else 'safetensors'}"
            file.write_bytes(mutated)
            outcomes.append(
                Outcome(
                    f"{file.suffix[1:]} {index}: {mutation}", verdict_of(file, worker.verdict(file))
                )
            )
            file.unlink()
    worker.close()
    return outcomes


def main() -> None:
    """Parse the flags, run, and print the failures and the counts; exit with 1 on a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="a small model; default: stories260K in Q8_0")
    parser.add_argument("--safetensors", type=Path, default=STORIES / "model.safetensors")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker()
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf = args.gguf or convert_stories(Path(folder) / "stories.gguf")
        outcomes = run(gguf, args.safetensors, args.count, args.seed)
    failures = [
        outcome
        for outcome in outcomes
        if outcome.verdict.startswith(("died", "wrong", "read although"))
    ]
    for outcome in failures:
        print(outcome.mutation, "|", outcome.verdict)
    for verdict, number in Counter(
        outcome.verdict.split(":")[0] for outcome in outcomes
    ).most_common():
        print(f"{number:6} {verdict}")
    raise SystemExit(bool(failures))


def convert_stories(out: Path, file_type: str = "Q8_0") -> Path:
    """Convert the test model stories260K to a GGUF file of a type, and return its path."""
    from quant.convert import checkpoint_source
    from quant.quantize import plan, write

    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(STORIES), file_type), out
    )
    return out


if __name__ == "__main__":
    main()
