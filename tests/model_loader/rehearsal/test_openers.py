"""Every module that opens a model file with llama.cpp says who has rehearsed the file before."""

import ast
from pathlib import Path

from tests.test_layers import ROOT, imported_names, source_files

OPENERS = {
    "llmcli.runtime.binding.model": "open_model",
    "llmcli.runtime.binding.trials.dry_run": "dry_run",
}
# Module -> why its files have been rehearsed, or need not be.
REASONS = {
    "llmcli.bench.compare.interleaved": "bench.compare.run.build_side rehearses both sides",
    "llmcli.bench.speed.measure": "commands.bench.speed rehearses the file",
    "llmcli.commands.bench.roofline": "rehearses the file itself",
    "llmcli.commands.bench.tune": "rehearses the file itself",
    "llmcli.model_loader.verify_tokenizer": "a vocabulary that has just been converted here",
    "llmcli.planning.measurements.flash_attention_probe": "a stub that is made here",
    "llmcli.planning.dry_runs.memory_plan": "ModelSwitcher, or commands.plan, rehearses the file",
    "llmcli.runtime.binding.trials.dry_run": "for memory_plan",
    "llmcli.runtime.binding.trials.rehearsal": "the rehearsal",
    "llmcli.runtime.open_speculation": "ModelSwitcher rehearses the draft model",
    "llmcli.runtime.reproducible": "for open_runner",
    "llmcli.runtime.runner": "ModelSwitcher, or commands.bench.phases, rehearses the file",
    "llmcli.runtime.text.template_check": "commands.show rehearses the file",
    "llmcli.workflows.calibration.calibrate": "float_copy.open_runnable rehearses the file",
    "llmcli.workflows.calibration.texts": "float_copy.open_runnable rehearses the file",
    "llmcli.workflows.evaluation.models": "commands.eval, or float_copy.open_runnable",
    "llmcli.workflows.quantization.scratch_model": "a copy that is made here of a rehearsed file",
}


def opens_a_file(path: Path) -> bool:
    """Return whether a module imports and calls a function that opens a model file."""
    names = {name for module, name in imported_names(path) if OPENERS.get(module) == name}
    calls = (
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    )
    return any(isinstance(call, ast.Name) and call.id in names for call in calls)


def test_every_opener_of_model_files_is_known() -> None:
    openers = {module for module, path in source_files(ROOT).items() if opens_a_file(path)}
    assert openers == set(REASONS), (
        "call rehearse_model (llmcli/model_loader/rehearsal/rehearse.py) before a file is opened, "
        "add the command to COMMANDS of test_rehearse.py, and the module here"
    )
