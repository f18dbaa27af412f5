"""`llmcli export vllm`: writes the `vllm serve` command and configuration for the same model.

The command refers to the original weights instead of the GGUF, because vLLM's GGUF plugin
(vllm-gguf-plugin 0.0.5) supports only CUDA and ROCm and is experimental. Settings of this machine
are left out; settings that change the answers and that vLLM does not have are refused by name.

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

from llmcli import text_input
from llmcli.commands.options import run
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.run_flags import Flags

if TYPE_CHECKING:
    from llmcli.commands.export.original_weights import Original

REF = "A model: catalog name, org/repo[:QUANT], file.gguf or folder."
CACHES = {"f16": "auto", "bf16": "bfloat16", "q8_0": "fp8"}
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
# settings that a vLLM server has no default for: a flag's name, and where it goes instead
ANSWERS = {
    "system": "as a message of each request",
    "stops": "as `stop` in each request",
    "ignore_eos": "as `ignore_eos` in each request",
    "constraint": "as `response_format` in each request",
    "model_draft": "with vLLM's --speculative-config",
    "reasoning": "as `chat_template_kwargs` in each request",
    "logprobs": "as `logprobs` in each request",
    "samples": "as `n` in each request",
    "raw": "by using /v1/completions",
    "prompt": "in the request",
    "file": "in the request",
}
NEVER = {
    "on_full": "vLLM ends an answer when the context is full",
    "quant": "vLLM runs the original weights",
    "endless": "vLLM never ends an answer because of repetition",
}
UNTYPED = {field.name: field.default for field in fields(Flags)}
TEMPLATE, CONFIG, START = "chat_template.jinja", "config.yaml", "serve.sh"


def vllm(
    ctx: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help=REF)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help=f"Write {CONFIG}, {TEMPLATE} and {START} to DIR."
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
    from llmcli.commands.command_context import start
    from llmcli.commands.export import original_weights

    given = run.read(ctx)
    if ref and given.model:
        raise UsageError(f"two models given: {ref} and {given.model}", hint="leave out one")
    if not (ref := ref or given.model):
        raise UsageError("no model given", hint="llmcli export vllm qwen3:8b -o DIR")
    _refuse_unsupported(given)
    config, ui = start(json, given.offline)
    weights = original_weights.original(ref, original, config, ui)
    _check_shape(weights, given, tensor)
    settings = {
        "model": weights.model,
        "revision": weights.revision or None,
        "served-model-name": name or weights.name,
        "max-model-len": given.options.ctx_size or weights.context or None,
        "kv-cache-dtype": CACHES[given.options.cache_type_k],
        "max-num-seqs": parallel,
        "tensor-parallel-size": tensor if tensor > 1 else None,
        "pipeline-parallel-size": pipeline if pipeline > 1 else None,
        **_sampling_settings(weights, given),
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    template = (
        text_input.template_text(given.chat_template) if given.chat_template else weights.template
    )
    if out is not None and template:
        settings["chat-template"] = TEMPLATE
    for line in _build_notes(weights, given, bool(template) and out is None):
        ui.note(line)
    files = _write_files(out, settings, template) if out is not None else []
    command = ["sh", str(out / START)] if out is not None else words(settings)
    if json:
        ui.result({"command": command, "config": settings, "files": [str(file) for file in files]})
    else:
        ui.text(shlex.join(command))


def words(table: Mapping[str, Any]) -> list[str]:
    """Return the configuration as a command line."""
    arguments = [
        word for key, value in table.items() if key != "model" for word in (f"--{key}", str(value))
    ]
    return ["vllm", "serve", table["model"], *arguments]


def yaml(table: Mapping[str, Any]) -> str:
    """Return the configuration as YAML, whose scalars are JSON."""
    return "".join(
        f"{key}: {json_module.dumps(value, ensure_ascii=False)}\n" for key, value in table.items()
    )


def _refuse_unsupported(given: Flags) -> None:
    """Raise UserError for all options that vLLM does not have, in one message."""
    request_fields = [
        (field, where)
        for field, where in ANSWERS.items()
        if getattr(given, field) != UNTYPED[field]
    ]
    problems = [f"--{field.replace('_', '-')} goes {where}" for field, where in request_fields]
    problems += [why for field, why in NEVER.items() if getattr(given, field) != UNTYPED[field]]
    if given.search.beams > 1:
        problems.append("--beams goes as `use_beam_search` in each request")
    if given.options.reproducible:
        problems.append("vLLM has no --reproducible")
    unsupported = [name for name in given.settings if name not in (*SAMPLING, "seed")]
    problems += [
        f"vLLM's servers have no default for --{name.replace('_', '-')}" for name in unsupported
    ]
    kinds = given.options.cache_type_k, given.options.cache_type_v
    if kinds[0] != kinds[1] or kinds[0] not in CACHES:
        problems.append(
            f"vLLM has no cache of K {kinds[0]} and V {kinds[1]} "
            f"(use one type for both: {', '.join(CACHES)})"
        )
    if problems:
        raise UserError("; ".join(problems), hint="leave these options out")


def _check_shape(found: "Original", given: Flags, tensor: int) -> None:
    """Raise UserError if the model's shape does not allow the requested options."""
    if tensor > 1 and found.heads and found.heads % tensor:
        divisors = ", ".join(
            str(count) for count in range(2, found.heads + 1) if found.heads % count == 0
        )
        raise UserError(
            f"{found.heads} attention heads cannot be divided among {tensor} GPUs",
            hint=f"--tensor-parallel {divisors}",
        )
    if (given.options.ctx_size or 0) > found.context > 0:
        raise UserError(
            f"-c {given.options.ctx_size} exceeds the {found.context} tokens of this model",
            hint=f"-c {found.context}",
        )


def _sampling_settings(found: "Original", given: Flags) -> dict[str, Any]:
    """Return the settings of the alias and the command line; others follow the model's generation
    config.
    """
    from llmcli.runtime.sampling import defaults

    chosen = {**found.settings, **given.settings}
    sampling = defaults().with_values(chosen)
    generation_config = {SAMPLING[key]: sampling[key] for key in chosen if key in SAMPLING}
    if given.predict not in (None, -1):
        generation_config["max_new_tokens"] = given.predict
    seed = sampling.seed if "seed" in chosen and sampling.seed >= 0 else None
    return {
        "seed": seed,
        "override-generation-config": json_module.dumps(generation_config)
        if generation_config
        else None,
    }


def _build_notes(found: "Original", given: Flags, unwritten: bool) -> list[str]:
    notes = [f"{found.model}: {found.because}"]
    if not found.floats:
        notes.append(
            "vLLM reads a GGUF only through vllm-gguf-plugin (CUDA and ROCm, experimental); "
            "--original ORG/REPO names the float weights"
        )
    if request_settings := (
        [*found.settings.keys() - {*SAMPLING, "seed"}] + (["system"] if found.system else [])
    ):
        notes.append(
            f"other settings of the alias go in each request: {', '.join(sorted(request_settings))}"
        )
    if given.options.cache_type_k == "q8_0":
        notes.append("q8_0 becomes fp8, which also has eight bits but rounds differently")
    if unwritten and found.floats:
        notes.append(
            "the repository's chat template is used; "
            f"-o DIR writes the template of llmcli as {TEMPLATE}"
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
    omitted = sorted(given.typed & local_options)
    if omitted:
        flag_names = ", ".join("--" + name.replace("_", "-") for name in omitted)
        notes.append(f"left out, because they apply only to this machine: {flag_names}")
    return notes


def _write_files(folder: Path, table: Mapping[str, Any], template: str) -> list[Path]:
    from llmcli.atomic_files import write_whole

    texts = {
        CONFIG: yaml(table),
        START: f'#!/bin/sh\ncd "$(dirname "$0")" && exec vllm serve --config {CONFIG} "$@"\n',
    }
    if template:
        texts[TEMPLATE] = template
    for name, text in texts.items():
        write_whole(folder / name, text.encode(), mode=0o777 if name == START else 0o666)
    return [folder / name for name in texts]


EXPORTS = (vllm,)
