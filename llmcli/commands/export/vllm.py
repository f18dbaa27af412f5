"""`llmcli export vllm`: writes the `vllm serve` command and configuration that run the same model.

The command refers to the original weights instead of the GGUF, because vLLM's GGUF plugin
(vllm-gguf-plugin 0.0.5) is experimental and supports only CUDA and ROCm. Settings that only concern
this machine are left out. Settings that change the answers but do not exist in vLLM raise an error
that names them.

Source: vLLM 0.33, docs/configuration/serve_args.md, and the settings that it reads from a
generation config.
"""

import json as json_module
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options import run
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.run_flags import RunFlags
from llmcli.model_loader.template_option import read_template_option

if TYPE_CHECKING:
    from llmcli.commands.export.original_weights import OriginalWeights

REF_HELP = "A model: catalog name, org/repo[:QUANT], file.gguf or folder."
CACHE_TYPES = {"f16": "auto", "bf16": "bfloat16", "q8_0": "fp8"}
SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
# settings that are not part of vLLM's server configuration, and where vLLM expects them instead
REQUEST_OPTIONS = {
    "system": "as a message of each request",
    "stops": "as `stop` in each request",
    "ignore_eos": "as `ignore_eos` in each request",
    "constraint": "as `response_format` in each request",
    "model_draft": "with vLLM's --speculative-config",
    "reasoning": "as `chat_template_kwargs` in each request",
    "reasoning_budget": "as `thinking_token_budget` in each request",
    "logprobs": "as `logprobs` in each request",
    "samples": "as `n` in each request",
    "raw": "by using /v1/completions",
    "prompt": "in the request",
    "file": "in the request",
}
UNSUPPORTED_OPTIONS = {
    "on_full": "vLLM ends an answer when the context is full",
    "quant": "vLLM runs the original weights",
    "endless": "vLLM never ends an answer because of repetition",
}
FLAG_DEFAULTS = {field.name: field.default for field in fields(RunFlags)}
TEMPLATE_FILE, CONFIG_FILE, START_FILE = "chat_template.jinja", "config.yaml", "serve.sh"


def vllm(
    ctx: typer.Context,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", autocompletion=complete_models, help=REF_HELP)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help=f"Write {CONFIG_FILE}, {TEMPLATE_FILE} and {START_FILE} to DIR.",
        ),
    ] = None,
    original: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Repository or folder of the float weights."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("-a", "--alias", help="Model name in the API [REF].")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("-np", "--parallel", min=1, help="Maximum requests at once.")
    ] = None,
    tensor: Annotated[
        int, typer.Option("-tp", "--tensor-parallel", min=1, help="GPUs that share each layer.")
    ] = 1,
    pipeline: Annotated[
        int,
        typer.Option(
            "-pp", "--pipeline-parallel", min=1, help="Groups of GPUs that share the layers."
        ),
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Write the vLLM command and configuration for the same model."""
    from llmcli.commands.command_line.command_context import start_command
    from llmcli.commands.export import original_weights

    run_flags = run.parse_run_flags(ctx)
    if not (ref := run.choose_model(ref, run_flags.model)):
        raise UsageError("no model given", hint="llmcli export vllm qwen3:8b -o DIR")
    _refuse_unsupported(run_flags)
    config, ui = start_command(json, run_flags.offline)
    weights = original_weights.find_original_weights(ref, original, config, ui)
    _check_shape(weights, run_flags, tensor)
    settings = {
        "model": weights.model,
        "revision": weights.revision or None,
        "served-model-name": name or weights.name,
        "max-model-len": run_flags.options.ctx_size or weights.context_length or None,
        "kv-cache-dtype": CACHE_TYPES[run_flags.options.cache_type_k],
        "max-num-seqs": parallel,
        "tensor-parallel-size": tensor if tensor > 1 else None,
        "pipeline-parallel-size": pipeline if pipeline > 1 else None,
        **_sampling_settings(weights, run_flags),
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    template = (
        read_template_option(run_flags.chat_template)
        if run_flags.chat_template
        else weights.template
    )
    if out is not None and template:
        settings["chat-template"] = TEMPLATE_FILE
    for line in _build_notes(weights, run_flags, bool(template) and out is None):
        ui.note(line)
    files = _write_files(out, settings, template) if out is not None else []
    command = ["sh", str(out / START_FILE)] if out is not None else build_command(settings)
    if json:
        ui.result({"command": command, "config": settings, "files": [str(file) for file in files]})
    else:
        ui.text(shlex.join(command))


def build_command(table: Mapping[str, Any]) -> list[str]:
    """Return the `vllm serve` command line for a configuration. `table`: values by setting name."""
    arguments = [
        word for key, value in table.items() if key != "model" for word in (f"--{key}", str(value))
    ]
    return ["vllm", "serve", table["model"], *arguments]


def format_yaml(table: Mapping[str, Any]) -> str:
    """Return a configuration as YAML. Each value is written as JSON, which is valid YAML."""
    return "".join(
        f"{key}: {json_module.dumps(value, ensure_ascii=False)}\n" for key, value in table.items()
    )


def _refuse_unsupported(run_flags: RunFlags) -> None:
    """Raise one UserError that names all options that vLLM does not have."""
    request_fields = [
        (field, where)
        for field, where in REQUEST_OPTIONS.items()
        if getattr(run_flags, field) != FLAG_DEFAULTS[field]
    ]
    problems = [f"--{field.replace('_', '-')} goes {where}" for field, where in request_fields]
    problems += [
        why
        for field, why in UNSUPPORTED_OPTIONS.items()
        if getattr(run_flags, field) != FLAG_DEFAULTS[field]
    ]
    if run_flags.search.beams > 1:
        problems.append("--beams goes as `use_beam_search` in each request")
    if run_flags.options.reproducible:
        problems.append("vLLM has no --reproducible")
    unsupported = [name for name in run_flags.settings if name not in (*SAMPLING_NAMES, "seed")]
    problems += [
        f"vLLM's servers have no default for --{name.replace('_', '-')}" for name in unsupported
    ]
    kinds = run_flags.options.cache_type_k, run_flags.options.cache_type_v
    if kinds[0] != kinds[1] or kinds[0] not in CACHE_TYPES:
        problems.append(
            f"vLLM has no cache of K {kinds[0]} and V {kinds[1]} "
            f"(use one type for both: {', '.join(CACHE_TYPES)})"
        )
    if problems:
        raise UserError("; ".join(problems), hint="leave these options out")


def _check_shape(weights: "OriginalWeights", run_flags: RunFlags, tensor: int) -> None:
    """Raise UserError if the number of attention heads cannot be divided among `tensor` GPUs, or if
    the context is longer than the model's.
    """
    if tensor > 1 and weights.n_heads and weights.n_heads % tensor:
        divisors = ", ".join(
            str(count) for count in range(2, weights.n_heads + 1) if weights.n_heads % count == 0
        )
        raise UserError(
            f"{weights.n_heads} attention heads cannot be divided among {tensor} GPUs",
            hint=f"--tensor-parallel {divisors}",
        )
    if (run_flags.options.ctx_size or 0) > weights.context_length > 0:
        raise UserError(
            f"-c {run_flags.options.ctx_size} exceeds the {weights.context_length} tokens of this model",
            hint=f"-c {weights.context_length}",
        )


def _sampling_settings(weights: "OriginalWeights", run_flags: RunFlags) -> dict[str, Any]:
    """Return the vLLM settings for the sampling options that the alias or the command line sets.
    All other sampling options are decided by the model's generation config.
    """
    from llmcli.runtime.sampling import default_sampling

    chosen = {**weights.settings, **run_flags.settings}
    sampling = default_sampling().with_values(chosen)
    generation_config = {
        SAMPLING_NAMES[key]: sampling[key] for key in chosen if key in SAMPLING_NAMES
    }
    if run_flags.predict not in (None, -1):
        generation_config["max_new_tokens"] = run_flags.predict
    seed = sampling.seed if "seed" in chosen and sampling.seed >= 0 else None
    return {
        "seed": seed,
        "override-generation-config": json_module.dumps(generation_config)
        if generation_config
        else None,
    }


def _build_notes(weights: "OriginalWeights", run_flags: RunFlags, unwritten: bool) -> list[str]:
    notes = [f"{weights.model}: {weights.reason}"]
    if not weights.is_float:
        notes.append(
            "vLLM reads a GGUF only through vllm-gguf-plugin (CUDA and ROCm, experimental); "
            "--original ORG/REPO names the float weights"
        )
    if request_settings := (
        [*weights.settings.keys() - {*SAMPLING_NAMES, "seed"}]
        + (["system"] if weights.system else [])
    ):
        notes.append(
            f"other settings of the alias go in each request: {', '.join(sorted(request_settings))}"
        )
    if run_flags.options.cache_type_k == "q8_0":
        notes.append("q8_0 becomes fp8, which also has eight bits but rounds differently")
    if unwritten and weights.is_float:
        notes.append(
            "the repository's chat template is used; "
            f"-o DIR writes the template of llmcli as {TEMPLATE_FILE}"
        )
    local_options = {
        "threads",
        "threads_batch",
        "batch_size",
        "ubatch_size",
        "gpu_layers",
        "flash_attn",
        "gemm",
    }
    omitted = sorted(run_flags.typed & local_options)
    if omitted:
        flag_names = ", ".join("--" + name.replace("_", "-") for name in omitted)
        notes.append(f"left out, because they apply only to this machine: {flag_names}")
    return notes


def _write_files(folder: Path, table: Mapping[str, Any], template: str) -> list[Path]:
    from llmcli.atomic_files import write_atomically

    texts = {
        CONFIG_FILE: format_yaml(table),
        START_FILE: f'#!/bin/sh\ncd "$(dirname "$0")" && exec vllm serve --config {CONFIG_FILE} "$@"\n',
    }
    if template:
        texts[TEMPLATE_FILE] = template
    for name, text in texts.items():
        write_atomically(folder / name, text.encode(), mode=0o777 if name == START_FILE else 0o666)
    return [folder / name for name in texts]


EXPORTS = (vllm,)
