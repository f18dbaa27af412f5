"""Predicted memory against llama.cpp's dry run of files of real models without weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from quant.model_file.read_header import read_header
from scripts.laboratory import dry_runs
from scripts.laboratory.model_headers import MODELS, write_header

NAMES = (
    "Qwen2.5-1.5B",
    "Phi-3.5-mini",
    "Gemma-3-4B",
    "gpt-oss-120B",
    "DeepSeek-V3-671B",
    "Granite-4-H-Tiny-7B",
    "Mamba-2.8B",
)


@pytest.mark.parametrize("name", NAMES)
def test_predicted_memory_on_the_host_is_at_least_that_of_a_dry_run(
    tmp_path: Path, name: str
) -> None:
    model = next(model for model in MODELS if model.name == name)
    header = read_header(write_header(model, tmp_path / f"{name}.gguf"))
    comparisons = list(dry_runs.compare(header, []))
    assert len(comparisons) >= 5
    assert [f"{each.what}: {each.fault}" for each in comparisons if each.fault] == []
    # buffers are an upper bound, but not a useless one
    extra = [each.predicted.compute - each.compute for each in comparisons]
    assert max(extra) < header.tensor_bytes // 4 + (64 << 20)


def test_predicted_memory_on_devices_is_at_least_that_of_a_dry_run() -> None:
    """Two workers on this machine are the devices. The script is another process, because workers
    cannot be unregistered.
    """
    done = subprocess.run(
        [sys.executable, dry_runs.__file__, "--only", "SmolLM2-135M|DeepSeek-V2-Lite"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 faults" in done.stdout
