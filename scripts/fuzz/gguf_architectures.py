#!/usr/bin/env python3
"""Run llmcli on mutated GGUF files of all architectures, and check that each ends well.

usage: .venv/bin/python scripts/fuzz/gguf_architectures.py FOLDER [--count 1500] [--seed 0]
       [--only REGEX] [--show INDEX]

FOLDER gets the tiny models of tiny_architectures.py, and results.jsonl with a line for each mutant.
A run that was interrupted goes on after the last line. A mutation changes hyperparameters, types,
tensors, the vocabulary or bytes of the header; a mutant is made of one or two. It is given to a
command that reads or runs a model. A mutant ends well if the command ends with a result or with one
clear error: without a signal, a traceback, more than 60 s of time, or more than 2 GB of memory. The
commands run in forks of this process, in a new home folder without saved verdicts.

The script prints the bad outcomes and a summary, and exits with 1 if there is a bad one. On a busy
machine, a slow mutant is run again when it is the only one: --show writes it to a file.
"""

import argparse
import json
import math
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads must not be forked
sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.gguf import layout
from quant.gguf.header import SCALAR_CODES, TYPE_NAMES, read_file_header
from quant.native import ggml
from scripts.fuzz import tiny_architectures

MAX_SECONDS, MAX_BYTES = 60.0, 2 << 30
KILL_SECONDS = 400.0  # of time; other programs may take most of the processor
CPU_SECONDS = 90
NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 255, 256, 257),
    *(320, 511, 512, 513, 1000, 1024, 4096, 65535, 65536, 1 << 20, 1 << 24, 1 << 28, 1 << 30),
    *(2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 2**63 - 1, 2**64 - 1),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3e38, math.nan, math.inf, -math.inf, 2.0)
WORDS = ("", "none", "linear", "yarn", "longrope", "su", "mean", "gelu", "\0", "x" * 5000, "ä")
TOKENIZERS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "no_vocab", "none", "gemma4", "test")
PRE_TOKENIZERS = ("default", "llama3", "qwen2", "deepseek-llm", "falcon", "tekken", "chatglm-bpe")
ADDED_KEYS = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.freq_base", "rope.dimension_count"),
    *("rope.scaling.original_context_length", "attention.key_length", "attention.value_length"),
    *("attention.causal", "attention.scale", "attention.output_scale", "nextn_predict_layers"),
    *("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"),
    *("expert_weights_scale", "expert_weights_norm", "decoder_block_count", "n_deepstack_layers"),
    *("attn_logit_softcapping", "final_logit_softcapping", "embedding_scale", "num_loops"),
    *("rescale_every_n_layers", "token_shift_count", "embedding_length_out", "pooling_type"),
    *("classifier.output_labels", "attention.temperature_length", "attention.shared_kv_layers"),
    *("attention.recurrent_layers", "rope.dimension_count_swa", "attention.key_length_swa"),
)
COMMANDS = (
    (12, ("run", "FILE", "w1 w2 w3", "-n", "3", "-t", "1", "--raw")),
    (3, ("run", "FILE", "w1", "-n", "2", "-t", "1")),
    (1, ("run", "FILE", "w1", "-n", "2", "-t", "1", "--reproducible")),
    (1, ("run", "FILE", "w1", "-n", "2", "-t", "1", "--samples", "2", "-ctk", "q8_0")),
    (2, ("plan", "FILE", "-t", "1")),
    (1, ("plan", "FILE", "-t", "1", "--measure", "-c", "512")),
    (2, ("bench", "FILE", "-p", "8", "-n", "2", "-r", "1", "-t", "1", "--no-history")),
    (1, ("eval", "FILE", "--chunks", "1", "-c", "64", "-t", "1", "-f", "TEXT")),
    (1, ("calibrate", "FILE", "--chunks", "1", "-c", "64", "-t", "1", "-f", "TEXT", "-o", "OUT")),
    (1, ("quantize", "FILE", "--type", "Q8_0", "-o", "OUT", "--threads", "1")),
    (1, ("show", "FILE", "--tensors")),
    (1, ("show", "FILE", "--template")),
)
TEXT = "Once upon a time there was a w1. " * 80
Entry = tuple[str, bytes]
Tensor = tuple[str, tuple[int, ...], str]


@dataclass
class Model:
    """The parts of a GGUF file: metadata entries, tensors, and the data of each tensor."""

    arch: str
    entries: list[Entry]
    tensors: list[Tensor]
    data: dict[str, bytes]
    notes: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """Return the value of a scalar or of a short array, or None."""
        for name, raw in self.entries:
            if name == key:
                return decode(raw)
        return None

    def replace(self, key: str, raw: bytes | None) -> None:
        """Set the entry `key`, or remove it if `raw` is None."""
        kept = [entry for entry in self.entries if entry[0] != key]
        if raw is not None and len(kept) < len(self.entries):
            kept = [(name, raw if name == key else old) for name, old in self.entries]
        elif raw is not None:
            kept.append((key, raw))
        self.entries = kept


@dataclass(frozen=True)
class Outcome:
    """What a command did with a mutant. `verdict`: "result", "told", or what was bad."""

    index: int
    arch: str
    mutation: str
    command: str
    verdict: str
    seconds: float
    cpu_seconds: float
    megabytes: int
    message: str


def read_model(path: Path) -> Model:
    """Read a tiny model."""
    header, data = read_file_header(path), path.read_bytes()
    return Model(
        path.stem,
        [(entry.key, entry.read_raw()) for entry in header.fields],
        [(tensor.name, tensor.shape, tensor.type) for tensor in header.tensors],
        {t.name: data[t.offset : t.offset + t.nbytes] for t in header.tensors},
    )


def decode(raw: bytes) -> Any:
    """Return the value of an entry: a number, a text, or a list of numbers. None for others."""
    (number,) = struct.unpack_from("<I", raw)
    kind = TYPE_NAMES.get(number)
    if kind == "string":
        return raw[12:].decode("utf-8", "replace")
    if kind == "array":
        item, count = struct.unpack_from("<IQ", raw, 4)
        if item in SCALAR_CODES and count <= 4096:
            return list(struct.unpack_from(f"<{count}{SCALAR_CODES[item]}", raw, 16))
        return None
    return struct.unpack_from("<" + SCALAR_CODES[number], raw, 4)[0]


def encode(kind: str, value: Any) -> bytes:
    """Return the stored form of a value; integers are cut to the width of their type."""
    if kind.startswith("array:"):
        return layout.encode_entry(kind, [_fit(kind[6:], item) for item in value])
    return layout.encode_entry(kind, _fit(kind, value))


def _fit(kind: str, value: Any) -> Any:
    if kind in ("float32", "float64"):
        number = float(value)
        return (
            number
            if kind == "float64" or abs(number) < 3.4e38 or not math.isfinite(number)
            else 1e38
        )
    if kind == "bool":
        return bool(value)
    if kind == "string":
        return str(value)
    bits = int(re.sub(r"\D", "", kind))
    number = int(value) if math.isfinite(value) else 0
    number &= (1 << bits) - 1
    return number - (1 << bits) if kind.startswith("int") and number >> (bits - 1) else number


def write_model(model: Model, path: Path) -> None:
    """Write the parts as a GGUF file. Data that is too short is repeated."""
    plan = layout.lay_out_file(model.entries, model.tensors, 32)
    with path.open("wb") as stream:
        stream.write(plan.header)
        for slot in plan.slots:
            stream.seek(slot.offset)
            if slot.nbytes > 1 << 24:
                continue
            blob = model.data.get(slot.name) or b"\1"
            stream.write((blob * (slot.nbytes // len(blob) + 1))[: slot.nbytes])
        stream.truncate(plan.nbytes)


def change_number(model: Model, rng: random.Random) -> str:
    """Replace the value of a number in the metadata."""
    keys = [
        k
        for k, raw in model.entries
        if isinstance(decode(raw), (int, float)) and k != "general.file_type"
    ]
    key = rng.choice(keys)
    old = model.value(key)
    if isinstance(old, float):
        new: Any = rng.choice(FLOATS)
        model.replace(key, encode("float32", new))
    elif isinstance(old, bool):
        new = not old
        model.replace(key, encode("bool", new))
    else:
        new = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, old // 2, old * 3))
        model.replace(key, encode("uint32", new))
    return f"{key} = {new} (was {old})"


def change_kind(model: Model, rng: random.Random) -> str:
    """Store a value of the metadata as another type."""
    keys = [k for k, raw in model.entries if decode(raw) is not None]
    key = rng.choice(keys)
    old = model.value(key)
    kind = rng.choice(
        ("uint32", "int32", "uint64", "int8", "float32", "bool", "string", "array:uint32",
         "array:float32", "array:int32", "array:bool", "array:string")
    )  # fmt: skip
    items = old if isinstance(old, list) else [old] * rng.choice((1, 2, 5, 22, 0, 600))
    if kind == "array:string":
        value: Any = [str(item) for item in items]
    elif kind.startswith("array:"):
        value = [item if isinstance(item, (int, float)) else 1 for item in items]
    elif kind == "string":
        value = str(old)
    else:
        first = old[0] if isinstance(old, list) and old else old
        value = first if isinstance(first, (int, float)) else 1
    model.replace(key, encode(kind, value))
    return f"{key} as {kind}"


def change_array(model: Model, rng: random.Random) -> str:
    """Change an array of numbers in the metadata, or make one of a number."""
    keys = [k for k, raw in model.entries if isinstance(decode(raw), (list, int)) and "." in k]
    key = rng.choice(keys)
    old = model.value(key)
    items = list(old) if isinstance(old, list) else [old] * rng.choice((2, 4, 22, 64))
    action = rng.choice(("zero", "one", "short", "long", "all"))
    if action == "zero" and items:
        items[rng.randrange(len(items))] = 0
    elif action == "one" and items:
        items[rng.randrange(len(items))] = rng.choice(NUMBERS)
    elif action == "short":
        items = items[: len(items) // 2]
    elif action == "long":
        items = items * 3
    else:
        items = [rng.choice(NUMBERS)] * len(items)
    is_float = any(isinstance(item, float) for item in items)
    model.replace(key, encode("array:float32" if is_float else "array:uint32", items))
    return f"{key} = {str(items)[:80]}"


def remove_key(model: Model, rng: random.Random) -> str:
    """Remove an entry of the metadata."""
    key = rng.choice(model.entries)[0]
    model.replace(key, None)
    return f"without {key}"


def add_key(model: Model, rng: random.Random) -> str:
    """Add a hyperparameter."""
    key = f"{model.arch}.{rng.choice(ADDED_KEYS)}"
    kind = rng.choice(("uint32", "uint32", "float32", "bool", "string", "array:uint32"))
    value: Any = rng.choice(NUMBERS)
    if kind == "string":
        value = rng.choice(WORDS)
    elif kind == "float32":
        value = rng.choice(FLOATS)
    elif kind.startswith("array"):
        value = [value] * rng.choice((1, 2, 5, 600))
    model.replace(key, encode(kind, value))
    return f"{key} = {str(value)[:60]} ({kind})"


def change_architecture(model: Model, rng: random.Random) -> str:
    """Give the file another architecture, with or without the names of its keys."""
    arch = rng.choice(tiny_architectures.ARCHITECTURES)
    model.replace("general.architecture", encode("string", arch))
    renames = rng.random() < 0.8
    if renames:
        model.entries = [
            (arch + key[len(model.arch) :] if key.startswith(f"{model.arch}.") else key, raw)
            for key, raw in model.entries
        ]
        model.arch = arch
    return f"architecture {arch}{'' if renames else ', keys unchanged'}"


def change_tensor_type(model: Model, rng: random.Random) -> str:
    """Store one tensor, or all of a kind, as another type."""
    kind = rng.choice([*ggml.TYPE_NUMBERS])
    name = rng.choice(model.tensors)[0]
    role = re.sub(r"\d+", "N", name) if rng.random() < 0.5 else ""
    block = ggml.block_size(kind).values
    changed = 0
    for index, (other, shape, _) in enumerate(model.tensors):
        chosen = other == name if not role else re.sub(r"\d+", "N", other) == role
        if chosen and shape[0] % block == 0:
            model.tensors[index] = (other, shape, kind)
            changed += 1
    return f"{role or name} as {kind} ({changed})"


def change_shape(model: Model, rng: random.Random) -> str:
    """Change the shape of a tensor."""
    index = rng.randrange(len(model.tensors))
    name, shape, kind = model.tensors[index]
    action = rng.choice(("swap", "number", "more", "less", "flat", "double"))
    new = list(shape)
    at = rng.randrange(len(new))
    if action == "swap":
        new.reverse()
    elif action == "number":
        new[at] = rng.choice([n for n in NUMBERS if 0 < n <= 1 << 20])
    elif action == "more" and len(new) < 4:
        new.append(rng.choice((1, 2, 3)))
    elif action == "less" and len(new) > 1:
        new.pop()
    elif action == "flat":
        new = [math.prod(new)]
    else:
        new[at] *= 2
    if kind not in ggml.TYPE_NUMBERS or new[0] % ggml.block_size(kind).values:
        kind = "F32"
    model.tensors[index] = (name, tuple(new), kind)
    return f"{name} {list(shape)} -> {new}"


def change_tensor_list(model: Model, rng: random.Random) -> str:
    """Remove, rename, repeat or reorder tensors."""
    index = rng.randrange(len(model.tensors))
    name, shape, kind = model.tensors[index]
    action = rng.choice(("remove", "rename", "extra", "reverse", "exchange"))
    if action == "remove":
        del model.tensors[index]
    elif action == "rename":
        model.tensors[index] = (
            rng.choice((name + "x", name.replace("blk.0", "blk.7"), "output.weight")),
            shape,
            kind,
        )
    elif action == "extra":
        model.tensors.append(
            (rng.choice(("output.bias", "cls.weight", "rope_freqs.weight", "x")), shape, kind)
        )
    elif action == "reverse":
        model.tensors.reverse()
    else:
        other = rng.randrange(len(model.tensors))
        model.tensors[index] = (name, *model.tensors[other][1:])
    return f"{action} {name}"


def change_vocabulary(model: Model, rng: random.Random) -> str:
    """Change the tokenizer."""
    prefix = "tokenizer.ggml."
    action = rng.randrange(10)
    if action == 0:
        value = rng.choice(TOKENIZERS)
        model.replace(prefix + "model", encode("string", value))
        return f"tokenizer {value}"
    if action == 1:
        value = rng.choice(PRE_TOKENIZERS)
        model.replace(prefix + "model", encode("string", "gpt2"))
        model.replace(prefix + "pre", encode("string", value))
        model.replace(prefix + "merges", encode("array:string", ["w 1", "w1", "", " ", "a b c"]))
        return f"gpt2 {value} with odd merges"
    if action == 2:
        count = rng.choice((0, 1, 2, 255, 259, 319, 321, 5000))
        words = [f"t{number}" if number > 258 else f"<0x{number:02X}>" for number in range(count)]
        model.replace(prefix + "tokens", encode("array:string", words))
        return f"{count} tokens"
    if action == 3:
        name = rng.choice(("scores", "token_type"))
        items = [rng.choice((0, 1, 2, 3, 4, 5, 6, 7, -1, 1000))] * rng.choice((0, 1, 319, 320, 321))
        model.replace(
            prefix + name, encode("array:int32" if name == "token_type" else "array:float32", items)
        )
        return f"{name} of {len(items)}"
    if action == 4:
        name = rng.choice(
            ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask", "eot", "eom")
        )
        value = rng.choice(NUMBERS)
        model.replace(f"{prefix}{name}_token_id", encode("uint32", value))
        return f"{name} = {value}"
    if action == 5:
        name = rng.choice(("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"))
        model.replace(prefix + name, encode("bool", rng.random() < 0.7))
        return name
    if action == 6:
        words = [
            rng.choice(("", " ", "\0", "w1", "\u2581", "x" * 3000, "<|im_end|>"))
            for _ in range(320)
        ]
        model.replace(prefix + "tokens", encode("array:string", words))
        return "odd tokens"
    if action == 7:
        model.replace(
            prefix + "precompiled_charsmap",
            encode("array:uint8", [rng.randrange(256) for _ in range(300)]),
        )
        model.replace(prefix + "model", encode("string", "t5"))
        return "t5 with a random charsmap"
    if action == 8:
        template = rng.choice(
            (
                "{% for m in messages %}{{ m.content }}{% endfor %}",
                "{{ 1 / 0 }}",
                "{%",
                "x" * 100000,
            )
        )
        model.replace("tokenizer.chat_template", encode("string", template))
        return f"template {template[:30]}"
    model.replace(prefix + "token_type_count", encode("uint32", rng.choice(NUMBERS)))
    return "token_type_count"


MUTATIONS = (
    (10, change_number),
    (3, change_kind),
    (4, change_array),
    (2, remove_key),
    (4, add_key),
    (4, change_architecture),
    (4, change_tensor_type),
    (4, change_shape),
    (2, change_tensor_list),
    (4, change_vocabulary),
)


def make_mutant(model: Model, rng: random.Random, path: Path) -> str:
    """Write a mutant of a model to `path`, and describe it."""
    weights, functions = zip(*MUTATIONS, strict=True)
    notes = [
        rng.choices(functions, weights)[0](model, rng)
        for _ in range(1 if rng.random() < 0.7 else 2)
    ]
    write_model(model, path)
    if rng.random() < 0.08:
        data, at = bytearray(path.read_bytes()), 0
        end = min(len(data), 4000)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(end)
            data[at] = rng.choice((data[at] ^ 1 << rng.randrange(8), rng.randrange(256), 255, 0))
        path.write_bytes(data)
        notes.append(f"byte {at}")
    if rng.random() < 0.02:
        size = path.stat().st_size
        os.truncate(path, rng.randrange(size))
        notes.append("cut")
    return "; ".join(notes)


def run_command(words: list[str], home: Path) -> tuple[int, float, float, int, str]:
    """Run llmcli with these words in a fork. Return its status (negative for a signal), seconds,
    CPU seconds, peak megabytes and stderr.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.monotonic()
        child = os.fork()
        if not child:
            _run_in_child(words, home, errors.fileno())
        usage, status = _wait(child, start + KILL_SECONDS)
        seconds = time.monotonic() - start
        errors.seek(max(0, errors.seek(0, 2) - 20000))
        text = errors.read().decode("utf-8", "replace")
    code = os.waitstatus_to_exitcode(status)
    return code, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10, text


def _run_in_child(words: list[str], home: Path, errors: int) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)
    os.environ["LLMCLI_HOME"] = str(home)
    os.environ.pop("LLMCLI_TRUST", None)
    sys.argv = ["llmcli", *words]
    code = 70
    try:
        from llmcli.app import main

        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - the traceback is the result
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, deadline: float) -> tuple[resource.struct_rusage, int]:
    """Wait for a process and its children, and kill them at the deadline."""
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return usage, status
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return usage, status


def judge(code: int, seconds: float, cpu: float, megabytes: int, text: str) -> str:
    """Return the verdict on a command. Time counts as a hang only if the process really computed,
    because other programs may take most of the processor.
    """
    if "Traceback (most recent call last)" in text:
        return "traceback"
    if code == -signal.SIGXCPU or (seconds > MAX_SECONDS and cpu > MAX_SECONDS / 2):
        return "hang"
    if code < 0 or code in (134, 139, 136, 137):
        return "hang" if seconds >= KILL_SECONDS else f"signal {code}"
    if megabytes > MAX_BYTES >> 20:
        return "memory"
    if code == 0:
        return "result"
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return "told" if code in (1, 2) and len(lines) == 1 else f"code {code}, {len(lines)} errors"


def base_models(folder: Path, only: str) -> list[Path]:
    """Return the tiny models, after writing those that are missing."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    paths = []
    for arch in tiny_architectures.ARCHITECTURES:
        path = models / f"{arch}.gguf"
        failed = models / f"{arch}.failed"
        is_new = not path.exists() and not failed.exists()
        if is_new and (reason := tiny_architectures.write_model(path, arch)):
            failed.write_text(reason)
        if path.exists() and re.search(only, arch):
            paths.append(path)
    return paths


def _import_all() -> None:
    """Import the modules of llmcli, so that the forks need not import them. Those of extras that
    are not installed are left out.
    """
    import importlib
    import pkgutil

    import llmcli

    for module in pkgutil.walk_packages(llmcli.__path__, "llmcli."):
        if not module.name.startswith(("llmcli.serve", "llmcli.batch.ray", "llmcli.hardware.ray")):
            with suppress(ImportError):
                importlib.import_module(module.name)


def run(args: argparse.Namespace) -> list[Outcome]:
    """Run the mutants that have no result yet, and return the outcomes of all."""
    _import_all()
    paths = base_models(args.folder, args.only)
    results = args.folder / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    finished = {outcome.index for outcome in outcomes}
    (args.folder / "text.txt").write_text(TEXT)
    with results.open("a") as stream:
        for index in range(args.count):
            if index in finished:
                continue
            with tempfile.TemporaryDirectory(prefix="llmcli-fuzz-") as scratch:
                outcome = run_mutant(index, args, paths, Path(scratch))
            stream.write(json.dumps(asdict(outcome)) + "\n")
            stream.flush()
            outcomes.append(outcome)
            if outcome.verdict not in ("result", "told"):
                print(f"{index}: {outcome.arch}: {outcome.mutation} | {outcome.command} | "
                      f"{outcome.verdict} {outcome.seconds:.0f} s | {outcome.message}", flush=True)  # fmt: skip
    return outcomes


def prepare_mutant(
    index: int, args: argparse.Namespace, paths: list[Path], file: Path
) -> tuple[str, str, list[str]]:
    """Write mutant number `index` to `file`. Return its architecture, its description, and the words
    of the command that it is for.
    """
    rng = random.Random(f"{args.seed}/{index}")
    path = paths[index % len(paths)]
    mutation = make_mutant(read_model(path), rng, file)
    weights, commands = zip(*COMMANDS, strict=True)
    return path.stem, mutation, list(rng.choices(commands, weights)[0])


def run_mutant(index: int, args: argparse.Namespace, paths: list[Path], scratch: Path) -> Outcome:
    """Make a mutant, run a command on it, and return the outcome."""
    file = scratch / "mutant.gguf"
    arch, mutation, words = prepare_mutant(index, args, paths, file)
    names = {
        "FILE": str(file),
        "OUT": str(scratch / "out.gguf"),
        "TEXT": str(args.folder / "text.txt"),
    }
    code, seconds, cpu, megabytes, text = run_command(
        [names.get(word, word) for word in words], scratch / "home"
    )
    errors = [
        line for line in text.splitlines() if line.startswith("error: ")
    ] or text.splitlines()[-1:]
    message = errors[0].replace(str(scratch), "")[:300] if errors else ""
    verdict = judge(code, seconds, cpu, megabytes, text)
    if verdict == "traceback":
        message = " / ".join(text.splitlines()[-3:])[:500]
    return Outcome(
        index,
        arch,
        mutation,
        " ".join(words),
        verdict,
        round(seconds, 2),
        round(cpu, 2),
        megabytes,
        message,
    )


def main() -> None:
    """Run, and print the bad outcomes and a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="regular expression of architectures")
    parser.add_argument(
        "--show", type=int, help="write this mutant to shown.gguf, and print its command"
    )
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    if args.show is not None:
        file = args.folder / "shown.gguf"
        print(prepare_mutant(args.show, args, base_models(args.folder, args.only), file), file)
        return
    outcomes = run(args)
    bad = [outcome for outcome in outcomes if outcome.verdict not in ("result", "told")]
    print(json.dumps({
        "mutants": len(outcomes),
        "architectures": len({outcome.arch for outcome in outcomes}),
        **Counter(re.sub(r"^code.*", "odd exit", outcome.verdict) for outcome in outcomes),
        "caught by the rehearsal": sum("llama.cpp crashes" in o.message or "time limit" in o.message
                                       or "takes more than" in o.message for o in outcomes),
        "longest seconds": max((o.seconds for o in outcomes), default=0),
        "longest CPU seconds": max((o.cpu_seconds for o in outcomes), default=0),
        "largest megabytes": max((o.megabytes for o in outcomes), default=0),
    }))  # fmt: skip
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
