"""Placements on two devices: what planning predicts for each device is what llama.cpp's dry run
reports. The devices are RPC workers on this machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from typing import Any

import numpy as np
import pytest

from scripts.fuzz.tiny_architectures import write_model
from tests.quant import tiny_gguf

COMMAND = (sys.executable, "-m", "llmcli.app")
# Typed options by the name of a case: tensors may be on the host, on one device or on two.
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "split": {"tensor_split": "2,1"},
    "one device": {"device": "RPC1"},
    "other order": {"device": "RPC1,RPC0", "tensor_split": "2,1"},
    "split mode none": {"split_mode": "none", "main_gpu": 1},
    "some experts": {"n_cpu_moe": "1"},
    "no experts": {"cpu_moe": True},
    "cache on the host": {"no_kv_offload": True},
    "a layer on the host": {"override_tensor": [r"blk\.0\.=CPU"]},
    "a matrix elsewhere": {"override_tensor": [r"blk\.1\.attn_q=RPC0", "ffn_up=RPC1"]},
    "buffer before experts": {"override_tensor": [r"blk\.1\.ffn=RPC0"], "cpu_moe": True},
    "embeddings": {"override_tensor": ["token_embd=RPC1"]},
    "only overrides": {"override_tensor": [r"blk\.1\.=RPC1"], "layers": "0"},
    "two parts": {"layers": "2"},
    "no device": {"device": "none"},
}
LEAST_MATRIX = 2048  # all matrices of the models have more bytes
# Prints for each case the logits of a text, the predicted and the planned bytes by device: weights, cache, buffers.
PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
from llmcli.hardware.rpc_workers import add_workers
from llmcli.model_loader.placement_flags import PlacementFlags
from llmcli.planning.dry_runs import memory_plan
from llmcli.planning.machine import read_machine
from llmcli.planning.placement.plan_placement import plan_placement, planned_machine
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.request import RunOptions
from llmcli.ui import UI
from quant.model_file.read_header import read_header
add_workers(tuple(sys.argv[1].split(",")))
header, cases, found = read_header(Path(sys.argv[2])), json.loads(sys.argv[3]), {}
ui = UI(json=False, color=False)
for name, words in cases.items():
    layers = words.pop("layers", "all")
    placing = PlacementFlags(**words).join(ui)
    options = RunOptions(256, 1, batch_size=64, ubatch_size=64, gpu_layers=layers)
    options = options.with_placement(placing)
    machine = read_machine()
    planned = plan_placement(header, options, machine, 256)
    names = ["CPU", *(device.name for device in planned_machine(options, machine).devices)]
    context = ContextOptions(256, 64, 64, offload_kqv=options.kv_offload)
    with open_model(header.path, planned.placement) as model, open_context(model, context) as run:
        tokens = [(7 + 101 * n) % run.n_vocab for n in range(12)]
        rows = BatchRows(tokens, range(12), [0] * 12, [False] * 11 + [True])
        logits = run.decode(rows)[0].logits.tolist()
    with memory_plan.open_memory_planner(header, context, planned.placement) as planner:
        shares = {share.device: share for share in planner.memory_plan().devices}
    found[name] = [
        logits,
        {name: (part.weights, part.kv, part.compute) for name, part in zip(names, planned.memory)},
        {
            name: (share.weights - (share.droppable or 0), share.kv, share.compute + share.output)
            for name, share in shares.items()
        },
    ]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def endpoints() -> Iterator[str]:
    """Start two workers on free ports, and return their addresses."""
    addresses = []
    with ExitStack() as stack:
        for _ in range(2):
            with create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            words = (*COMMAND, "worker", "--rpc", "--port", str(port), "-t", "1")
            process = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout
            process.stdout.readline()
            assert "worker at" in process.stdout.readline()
            addresses.append(f"127.0.0.1:{port}")
        yield ",".join(addresses)


@pytest.mark.parametrize("kind", ["experts", "dense"])
def test_the_prediction_for_each_device_is_what_the_dry_run_reports(
    endpoints: str, kind: str, tmp_path: Path
) -> None:
    model = tmp_path / "tiny.gguf"
    if kind == "experts":
        write_model(model, "qwen3moe")
    else:
        tiny_gguf.llama(model, layers=3)
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, endpoints, str(model), json.dumps(CASES)),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = np.array(found["no device"][0])
    for name, (logits, predicted, planned) in found.items():
        np.testing.assert_allclose(logits, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
        for device in sorted({*predicted, *planned}):
            weights, kv, compute = predicted.get(device, (0, 0, 0))
            real_weights, real_kv, real_compute = planned.get(device, (0, 0, 0))
            where = (kind, name, device)
            assert (where, kv) == (where, real_kv)
            assert compute >= real_compute, (where, compute, real_compute)
            # buffers and the mapped file have a few bytes between tensors
            assert abs(weights - real_weights) < LEAST_MATRIX, (where, weights, real_weights)
