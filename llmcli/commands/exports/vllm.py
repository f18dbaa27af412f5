"""`llmcli export vllm`: the `vllm serve` command and configuration that run the same model on a
cluster of GPUs.

The original weights go along, not the GGUF: vLLM's GGUF plugin (vllm-gguf-plugin 0.0.5) is for CUDA
and ROCm alone and calls itself experimental. What of this machine's settings has no meaning there
is left out; what would change the answers and cannot be said to vLLM is refused by name. Followed:
vLLM 0.33's docs/configuration/serve_args.md (a YAML of long flags) and the settings that it takes
from a generation config.
"""

import json as json_module
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands import flags
from llmcli.commands.flags import Flags
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.commands.originals import Original

REF = "A model: catalog name, org/repo[:QUANT], file.gguf or folder."
CACHES = {"f16": "auto", "bf16": "bfloat16", "q8_0": "fp8"}
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
# What an answer is made with and no default of a vLLM server can say; a flag's name, and where it
# goes instead.
ANSWERS = {
    "system": "as a message of each request",
    "stops": "as `stop` in each request",
    "ignore_eos": "as `ignore_eos` in each request",
    "constraint": "as `response_format` in each request",
    "model_draft": "with vLLM's own --speculative-config",
    "reasoning": "as `chat_template_kwargs` in each request",
    "logprobs": "as `logprobs` in each request",
    "samples": "as `n` in each request",
    "raw": "by asking /v1/completions",
    "prompt": "in the request",
    "file": "in the request",
}
NEVER = {
    "on_full": "vLLM ends an answer when the context is full",
    "quant": "the original weights are run",
    "endless": "vLLM never ends an answer for repeating itself",
}
UNTYPED = {field.name: field.default for field in fields(Flags)}
TEMPLATE, CONFIG, START = "chat_template.jinja", "config.yaml", "serve.sh"


def vllm(
    ctx: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help=REF)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help=f"Write {CONFIG}, {TEMPLATE} and {START} there."
        ),
    ] = None,
    original: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Where the float weights are, if that is not known."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("-a", "--alias", help="The name that clients ask for [REF].")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("-np", "--parallel", min=1, help="Most requests at once.")
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
    from llmcli.commands import originals
    from llmcli.commands.show import start

    given = flags.read(ctx)
    if ref and given.model:
        raise UsageError(f"two models: {ref} and {given.model}", hint="leave one of them out")
    if not (ref := ref or given.model):
        raise UsageError("no model given", hint="llmcli export vllm qwen3:8b -o DIR")
    _refuse(given)
    config, ui = start(json, given.offline)
    found = originals.original(ref, original, config, ui)
    _check(found, given, tensor)
    table = {
        "model": found.model,
        "revision": found.revision or None,
        "served-model-name": name or found.name,
        "max-model-len": given.options.ctx_size or found.context or None,
        "kv-cache-dtype": CACHES[given.options.cache_type_k],
        "max-num-seqs": parallel,
        "tensor-parallel-size": tensor if tensor > 1 else None,
        "pipeline-parallel-size": pipeline if pipeline > 1 else None,
        **_drawing(found, given),
    }
    table = {key: value for key, value in table.items() if value is not None}
    template = flags.template_text(given.chat_template) if given.chat_template else found.template
    if out is not None and template:
        table["chat-template"] = TEMPLATE
    for line in _notes(found, given, bool(template) and out is None):
        ui.note(line)
    files = _write(out, table, template) if out is not None else []
    command = ["sh", str(out / START)] if out is not None else words(table)
    if json:
        ui.result({"command": command, "config": table, "files": [str(file) for file in files]})
    else:
        ui.text(shlex.join(command))


def words(table: Mapping[str, Any]) -> list[str]:
    """The configuration as a command line."""
    rest = [
        word for key, value in table.items() if key != "model" for word in (f"--{key}", str(value))
    ]
    return ["vllm", "serve", table["model"], *rest]


def yaml(table: Mapping[str, Any]) -> str:
    """The configuration as YAML; every scalar of JSON is one of YAML."""
    return "".join(
        f"{key}: {json_module.dumps(value, ensure_ascii=False)}\n" for key, value in table.items()
    )


def _refuse(given: Flags) -> None:
    """Raise UserError for everything at once that was typed and that vLLM cannot be told so."""
    typed = [
        (field, where)
        for field, where in ANSWERS.items()
        if getattr(given, field) != UNTYPED[field]
    ]
    wrong = [f"--{field.replace('_', '-')} goes {where}" for field, where in typed]
    wrong += [why for field, why in NEVER.items() if getattr(given, field) != UNTYPED[field]]
    if given.search.beams > 1:
        wrong.append("--beams goes as `use_beam_search` in each request")
    if given.options.reproducible:
        wrong.append("vLLM has no --reproducible")
    lost = [name for name in given.settings if name not in (*SAMPLING, "seed")]
    wrong += [f"vLLM's servers have no default for --{name.replace('_', '-')}" for name in lost]
    kinds = given.options.cache_type_k, given.options.cache_type_v
    if kinds[0] != kinds[1] or kinds[0] not in CACHES:
        wrong.append(
            f"vLLM has no cache of K {kinds[0]} and V {kinds[1]} (one type for both: {', '.join(CACHES)})"
        )
    if wrong:
        raise UserError("; ".join(wrong), hint="leave that out")


def _check(found: "Original", given: Flags, tensor: int) -> None:
    """Raise UserError where the model's shape does not allow what is asked."""
    if tensor > 1 and found.heads and found.heads % tensor:
        fitting = ", ".join(
            str(count) for count in range(2, found.heads + 1) if found.heads % count == 0
        )
        raise UserError(
            f"{found.heads} attention heads cannot be shared by {tensor} GPUs",
            hint=f"--tensor-parallel {fitting}",
        )
    if (given.options.ctx_size or 0) > found.context > 0:
        raise UserError(
            f"-c {given.options.ctx_size} is beyond the {found.context} tokens that this model was made for",
            hint=f"-c {found.context}",
        )


def _drawing(found: "Original", given: Flags) -> dict[str, Any]:
    """Settings that an alias or the command line gives; without any the model's own generation
    config holds.
    """
    from llmcli.runtime.sampling import defaults

    chosen = {**found.settings, **given.settings}
    sampling = defaults().with_values(chosen)
    drawing = {SAMPLING[key]: sampling[key] for key in chosen if key in SAMPLING}
    if given.predict not in (None, -1):
        drawing["max_new_tokens"] = given.predict
    seed = sampling.seed if "seed" in chosen and sampling.seed >= 0 else None
    return {
        "seed": seed,
        "override-generation-config": json_module.dumps(drawing) if drawing else None,
    }


def _notes(found: "Original", given: Flags, unwritten: bool) -> list[str]:
    notes = [f"{found.model}: {found.because}"]
    if not found.floats:
        notes.append(
            "vLLM reads a GGUF only through vllm-gguf-plugin (CUDA and ROCm, experimental); "
            "--original ORG/REPO names the float weights"
        )
    if lost := (
        [*found.settings.keys() - {*SAMPLING, "seed"}] + (["system"] if found.system else [])
    ):
        notes.append(
            f"what the alias says beside that goes in each request: {', '.join(sorted(lost))}"
        )
    if given.options.cache_type_k == "q8_0":
        notes.append("q8_0 becomes fp8: eight bits as well, rounded otherwise")
    if unwritten and found.floats:
        notes.append(
            f"the repository's own chat template is used; -o DIR writes the one that llmcli uses as {TEMPLATE}"
        )
    ours = {
        "threads",
        "threads_batch",
        "batch_size",
        "ubatch_size",
        "gpu_layers",
        "flash_attn",
        "gemm",
    }
    left = sorted(given.typed & ours)
    if left:
        words = ", ".join("--" + name.replace("_", "-") for name in left)
        notes.append(f"left out, for this machine alone: {words}")
    return notes


def _write(folder: Path, table: Mapping[str, Any], template: str) -> list[Path]:
    from llmcli.catalog.partial import write_whole

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
