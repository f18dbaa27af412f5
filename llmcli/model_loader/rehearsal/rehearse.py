"""Rehearse the load of a model file that is new on this machine, in a child process with limits of
time and memory.

A GGUF file is untrusted. llama.cpp aborts, crashes or loops on some damaged or malicious files, and
that would end this process, and with it the user's conversation. The checks of the header
(quant/model_file/load_checks.py) find the known cases and name the faulty entry. The rehearsal
finds the others: the child loads the file without its weights, then with them, computes two passes,
and renders the chat template. Its verdict is saved (verdicts.py).
"""

import json
import re
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import llmcli
from llmcli import file_lock
from llmcli.config import build_child_environ
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.hardware.limited_process import ProcessLimits, ProcessOutcome, run_limited
from llmcli.model_loader.rehearsal.child import ChildRequest
from llmcli.model_loader.rehearsal.verdicts import (
    COMPUTING,
    CRASH,
    FORMATTING,
    LOADING,
    MEMORY,
    TIME,
    Fault,
    Verdict,
    VerdictStore,
)
from llmcli.units import format_size
from quant.model_file import load_checks, read_header

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

# Memory of the child besides the mapped weights. The vocabularies, graphs and caches of the largest
# models take a few hundred megabytes.
MAX_DATA_BYTES = 1536 << 20
USABLE_FRACTION = 0.8  # of the free memory
# Limits of computing time and of time, for a small file. The weights are read once.
CPU_SECONDS, WALL_SECONDS = 20, 45
WEIGHT_BYTES_PER_CPU_SECOND, WEIGHT_BYTES_PER_SECOND = 64 << 20, 20 << 20
MAX_THREADS = 8
MAX_CAUSE_CHARACTERS = 200
# Of files with more weights, the user is told before the rehearsal, because it may take seconds.
LARGE_BYTES = 2 << 30
# The child sees no GPU: starting one takes seconds, and the CPU's graphs have the same shapes.
HIDDEN_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "GGML_VK_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",
}
# With `python -m`, a module in the current folder could replace one of llmcli or of Python.
CHILD_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from llmcli.model_loader.rehearsal.child import main; main()"
)
STAGE_ACTIONS = {
    LOADING: "while it loads {name}",
    COMPUTING: "while it computes a token with {name}",
    FORMATTING: "while the chat template of {name} is rendered",
}
TRUST_HINT = "fetch or convert the file again; --trust uses it without this check"
TEMPLATE_HINT = "use --raw for no template, or --chat-template FILE for another one"
# errors of llama.cpp and of C++ about memory
MEMORY_ERROR = re.compile(
    r"bad_alloc|(failed|unable|attempted) to allocate|(out of|not enough) memory|Cannot allocate"
)
# "/build/ggml/src/ggml.c:123: GGML_ASSERT(…) failed", the message of an abort
ABORT_MESSAGE = re.compile(r"^(?:\S*/)?([\w.-]+:\d+: .*)$")


def rehearse_model(
    header: "ModelHeader",
    config: "Config",
    ui: "UI",
    *,
    computes: bool = True,
    uses_template: bool = False,
) -> bool:
    """Raise UserError if llama.cpp crashes, hangs or takes too much memory with a model file, or if
    it refuses the file. Return whether the file was rehearsed: False if the user trusts all files.

    If this file is new here, it is loaded in a child process, and a note says how long that took.
    `computes`: whether the caller computes tokens; otherwise the weights are not read.
    `uses_template`: whether the caller renders the file's chat template.
    """
    if config.trust_files:
        return False
    store = VerdictStore(header, config)
    verdict = store.load()
    if verdict is None or not verdict.answers(computes):
        load_checks.check_loadable(header)
        computes = computes and _fits(header)
        with ExitStack() as stack:
            # Without a writable folder, processes do not wait for one another's verdict.
            with suppress(UserError):
                stack.enter_context(
                    file_lock.hold_lock(store.lock_path, ui, "the rehearsal of a model file")
                )
            verdict = store.load()
            if verdict is None or not verdict.answers(computes):
                verdict = _rehearse(header, computes, store, ui)
    _require_no_fault(verdict.fault, header.path, uses_template)
    return True


def rehearse_file(path: Path, config: "Config", ui: "UI", *, computes: bool = True) -> None:
    """Rehearse the load of the model file `path`, as `rehearse_model`."""
    if not config.trust_files:
        rehearse_model(read_header.read_header(path), config, ui, computes=computes)


def rehearse_conversion(path: Path, name: str, ui: "UI") -> None:
    """Raise UserError if llama.cpp does not survive or refuses a file that was converted just now,
    or if it computes NaN or infinite numbers with it. `name`: the model's name, for a note. No
    verdict is saved.
    """
    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    computes = _fits(header)
    if not computes:
        ui.warn(
            f"{name} does not fit into the free memory: whether llama.cpp computes numbers with it "
            "was not checked"
        )
    start_time = time.monotonic()
    fault, _ = _run_child(header, computes, requires_numbers=True)
    _require_no_fault(fault, path, uses_template=False)
    ui.note(
        f"llama.cpp has loaded {name}"
        + " and computed finite numbers with it" * computes
        + f" ({time.monotonic() - start_time:.1f} s)"
    )


def _fits(header: "ModelHeader") -> bool:
    """Return whether the weights fit into the free memory. Reading larger weights would push one
    another out of it, so the run would read all of them from the disk again.
    """
    free_bytes = host.available_memory()
    return free_bytes is None or header.tensor_bytes < free_bytes


def _rehearse(header: "ModelHeader", computes: bool, store: VerdictStore, ui: "UI") -> Verdict:
    """Load the file in a child process. Return the verdict, after saving it unless it may depend on
    the state of the machine. Raises UserError if llama.cpp refuses the file.
    """
    name, weight_bytes = header.path.name, header.tensor_bytes if computes else 0
    if weight_bytes > LARGE_BYTES:
        ui.note(f"{name} is new here: llama.cpp first loads it in a separate process")
    start_time = time.monotonic()
    fault, is_certain = _run_child(header, computes)
    verdict = Verdict(computes, fault)
    if is_certain:
        try:
            store.save(verdict)
        except UserError as error:
            ui.warn(f"the next start loads {name} in a separate process again: {error}")
    if fault is None:
        ui.note(
            f"{name} is new here: llama.cpp loaded it in a separate process first "
            f"({time.monotonic() - start_time:.1f} s, only once; --trust skips it)"
        )
    return verdict


def _run_child(
    header: "ModelHeader", computes: bool, *, requires_numbers: bool = False
) -> tuple[Fault | None, bool]:
    """Load the file in a child process. Return what went wrong, None for nothing, and whether that
    does not depend on the state of the machine. Raises UserError if llama.cpp refuses the file.
    """
    limits = _limits(header.tensor_bytes if computes else 0)
    request = ChildRequest(
        str(header.path.absolute()),
        computes,
        min(host.core_count(), MAX_THREADS),
        header.has_latent_attention,
        limits.data_bytes,
        limits.cpu_seconds,
        header.chat_template,
        requires_numbers,
    )
    outcome = run_limited(
        [sys.executable, "-P", "-c", CHILD_PROGRAM, str(Path(llmcli.__path__[0]).parent)],
        json.dumps(asdict(request)).encode(),
        limits,
        build_child_environ(**HIDDEN_DEVICES),
    )
    fault = _find_fault(outcome, limits)
    return fault, not _depends_on_machine(fault, outcome, limits)


def _limits(weight_bytes: int) -> ProcessLimits:
    """Return the limits of a child process that reads this many bytes of weights."""
    free_bytes = host.available_memory()
    data_bytes = (
        MAX_DATA_BYTES
        if free_bytes is None
        else min(MAX_DATA_BYTES, int(free_bytes * USABLE_FRACTION))
    )
    return ProcessLimits(
        data_bytes,
        CPU_SECONDS + weight_bytes // WEIGHT_BYTES_PER_CPU_SECOND,
        WALL_SECONDS + weight_bytes / WEIGHT_BYTES_PER_SECOND,
    )


def _depends_on_machine(
    fault: Fault | None, outcome: ProcessOutcome, limits: ProcessLimits
) -> bool:
    """Return whether a fault may be due to a busy machine or to little free memory. The verdict is
    not saved then.
    """
    return fault is not None and (
        outcome.timed_out
        or outcome.code == -signal.SIGKILL
        or (fault.kind == MEMORY and limits.data_bytes < MAX_DATA_BYTES)
    )


def _find_fault(outcome: ProcessOutcome, limits: ProcessLimits) -> Fault | None:
    """Return what went wrong in the child process, or None if it ended well. Raises UserError if
    llama.cpp refused the file.
    """
    lines = outcome.output.splitlines()
    stages = [line for line in lines if line in STAGE_ACTIONS]
    stage = stages[-1] if stages else LOADING
    if outcome.ran_out_of_time:
        return Fault(TIME, stage, "")
    memory_fault = Fault(MEMORY, stage, format_size(limits.data_bytes))
    cause = _find_cause(outcome.errors) or outcome.signal_name
    if outcome.code == 0 and lines:
        with suppress(ValueError):
            refusal = json.loads(lines[-1])["refusal"]
            if refusal is None:
                return None
            message, hint = refusal
            if MEMORY_ERROR.search(message):
                return memory_fault
            raise UserError(message, hint=hint)
    # SIGKILL: Linux ends processes when the memory is used up
    if outcome.code == -signal.SIGKILL or MEMORY_ERROR.search(outcome.errors):
        return memory_fault
    return Fault(CRASH, stage, cause or f"exit code {outcome.code}")


def _find_cause(errors: str) -> str:
    """Return the line of the child's stderr that says why it ended: the message of an abort or of a
    C++ exception, otherwise the last line.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        if match := ABORT_MESSAGE.match(line):
            return match[1][:MAX_CAUSE_CHARACTERS]
        if line.startswith("what():"):
            return line.removeprefix("what():").strip()[:MAX_CAUSE_CHARACTERS]
    return lines[-1][:MAX_CAUSE_CHARACTERS] if lines else ""


def _require_no_fault(fault: Fault | None, path: Path, uses_template: bool) -> None:
    """Raise UserError for a fault. A fault of the chat template matters only if it is used."""
    if fault is None or (fault.stage == FORMATTING and not uses_template):
        return
    action = STAGE_ACTIONS.get(fault.stage, STAGE_ACTIONS[LOADING]).format(name=path.name)
    messages = {
        TIME: f"the time limit ended llama.cpp {action}",
        MEMORY: f"llama.cpp takes more than {fault.cause}, besides the weights, {action}",
    }
    raise UserError(
        messages.get(fault.kind, f"llama.cpp crashes {action}: {fault.cause}"),
        hint=TEMPLATE_HINT if fault.stage == FORMATTING else TRUST_HINT,
    )
