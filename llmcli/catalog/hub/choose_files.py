"""Chooses which files of a hub repository to fetch: one GGUF with all its shards, or the files of a
float checkpoint.

The rules for GGUFs are those of llama.cpp (common/download.cpp). However, if several files match,
llama.cpp takes the first, and llmcli asks the user to choose. The choice depends only on names and
sizes, and for pickles also on whether torch is installed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.catalog.names.gguf_names import is_model_name
from llmcli.catalog.names.shard_names import parse_shard_name
from llmcli.catalog.spec import Spec
from llmcli.errors import UserError
from llmcli.units import format_size
from quant.checkpoint.adapters import ADAPTER_CONFIG, lora_error
from quant.checkpoint.pickles import (
    INDEX_FILE,
    SINGLE_FILE,
    choose_pickles,
    pickles_not_allowed,
    require_torch,
)

TYPE_SUFFIX = re.compile(r"[-.](\w+)$")
# Files that a conversion needs in addition to the weights. They contain data, never code.
CONVERSION_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "1_Pooling/config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
}


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a hub repository. `name`: its path in the repository. `size`: in bytes. `digest`:
    its sha256 in hex or, for a small file that git stores itself, its git blob id.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files to fetch. `kind`: "gguf" or "folder" (a checkpoint). `files`: of a GGUF, the first
    is the file to load. `note`: text to print for the user, or "".
    """

    kind: str
    files: tuple[HubFile, ...]
    note: str = ""


def choose_files(spec: Spec, blobs: Sequence[HubFile], allow_pickle: bool = False) -> ChosenFiles:
    """Choose the files that `spec` asks for from the files `blobs` of the repository.

    A GGUF is preferred to a checkpoint, unless `spec` requests safetensors. Pickled weights are
    chosen only if there are no others, and need `allow_pickle` and torch. Raises UserError that
    lists the alternatives if nothing or several files match.
    """
    first_files = [blob for blob in blobs if is_model_name(blob.name)]
    if spec.file or spec.quant.lower().endswith(".gguf"):
        return ChosenFiles("gguf", _choose_by_name(spec.file or spec.quant, spec.repo, blobs))
    if first_files and spec.format != "safetensors":
        return _choose_by_type(spec, first_files, blobs)
    if weights := _safetensors(blobs, allow_pickle):
        return _choose_checkpoint(spec, blobs, weights)
    if pickles := _pickles(blobs):
        return _choose_pickles(spec, blobs, pickles, allow_pickle)
    kinds = sorted({blob.name.rpartition(".")[2] for blob in blobs if "." in blob.name})
    raise UserError(
        f"{spec.repo} contains neither GGUF nor safetensors (only {', '.join(kinds) or 'nothing'})",
        hint=f"search the hub for a GGUF of it: {spec.repo.split('/')[1]}-GGUF",
    )


def type_in_name(name: str) -> str:
    """Return the type in the name of a GGUF, or "" if there is none. For example,
    Model-Q4_K_M-00001-of-00002.gguf has the type Q4_K_M.
    """
    shard = parse_shard_name(name)
    stem = shard.stem if shard else name[: -len(".gguf")]
    type_match = TYPE_SUFFIX.search(stem)
    return type_match[1].upper() if type_match else ""


def _choose_by_type(
    spec: Spec, first_files: Sequence[HubFile], blobs: Sequence[HubFile]
) -> ChosenFiles:
    """Return the GGUF of the requested type. If no type is requested, return Q4_K_M, else Q8_0,
    else the first GGUF. `first_files`: the GGUFs, each represented by its first shard.

    Raises UserError if the repository does not have the type, or several GGUFs have it.
    """
    for type_name in [spec.quant] if spec.quant else ["Q4_K_M", "Q8_0"]:
        names = (
            [type_name, type_name.removesuffix("_M")] if type_name.endswith("_K_M") else [type_name]
        )
        for name in names:
            matches = [blob for blob in first_files if type_in_name(blob.name) == name]
            matches = matches or [
                blob
                for blob in first_files
                if re.search(re.escape(name) + "[.-]", blob.name, re.IGNORECASE)
            ]
            if len(matches) > 1:
                raise UserError(
                    f"{spec.repo}:{name} matches {_describe_models(matches, blobs)}",
                    hint=f"choose one: {spec.repo}:{matches[0].name}",
                )
            if matches:
                note = (
                    ""
                    if type_name == (spec.quant or "Q4_K_M")
                    else f"{spec.repo} has no Q4_K_M; taking {matches[0].name}"
                )
                return ChosenFiles("gguf", _all_shards(matches[0], blobs), note=note)
    if spec.quant:
        raise UserError(
            f"{spec.repo} has no {spec.quant}; it has {_describe_models(first_files, blobs)}",
            hint=f"for example: {spec.repo}:{type_in_name(first_files[0].name) or first_files[0].name}",
        )
    return ChosenFiles(
        "gguf",
        _all_shards(first_files[0], blobs),
        note=f"{spec.repo} has no Q4_K_M; taking {first_files[0].name}",
    )


def _choose_by_name(name: str, repo: str, blobs: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Return the file called `name` with all its shards. Raises UserError if there is none."""
    for blob in blobs:
        if blob.name.lower() == name.lower():
            return _all_shards(blob, blobs)
    ggufs = [blob for blob in blobs if is_model_name(blob.name)]
    raise UserError(
        f"{repo} has no file {name}",
        hint=f"it has {_describe_models(ggufs, blobs)}" if ggufs else "it has no GGUF at all",
    )


def _all_shards(file: HubFile, blobs: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Return all shards of the split model to which `file` belongs, in order. Return only `file` if
    it is not a shard. Raises UserError if a shard is missing in the repository.
    """
    shard = parse_shard_name(file.name)
    if not shard:
        return (file,)
    table = {blob.name: blob for blob in blobs}
    if missing := [name for name in shard.all_names if name not in table]:
        raise UserError(
            f"{', '.join(missing[:3])} of the split model {file.name} is missing in the repository",
            hint="choose another type",
        )
    return tuple(table[name] for name in shard.all_names)


def _choose_checkpoint(
    spec: Spec, blobs: Sequence[HubFile], weights: tuple[HubFile, ...], remark: str = ""
) -> ChosenFiles:
    """Return a checkpoint: its weights, and the files that a conversion also needs. `remark`: note
    for the user. Raises UserError if the repository has no config.json.
    """
    conversion_files = tuple(blob for blob in blobs if blob.name in CONVERSION_FILES)
    if not any(blob.name == "config.json" for blob in conversion_files):
        if any(blob.name == ADAPTER_CONFIG for blob in blobs):
            raise lora_error(spec.repo, "another model")
        raise UserError(
            f"{spec.repo} has weights but no config.json",
            hint="without config.json a model cannot be converted",
        )
    return ChosenFiles("folder", conversion_files + weights, remark)


def _safetensors(blobs: Sequence[HubFile], allow_pickle: bool) -> tuple[HubFile, ...]:
    """Return the safetensors called model*, with their index. If there are none, return all
    safetensors at the top level of the repository.

    Safetensors with other names cannot always be read. Therefore they are not returned if the
    repository also has pickles and these are allowed.
    """
    top_level = [
        blob
        for blob in blobs
        if "/" not in blob.name
        and not blob.name.startswith(".")
        and blob.name.endswith((".safetensors", ".safetensors.index.json"))
    ]
    model_files = [blob for blob in top_level if blob.name.startswith("model")]
    return tuple(model_files or (() if allow_pickle and _pickles(blobs) else top_level))


def _pickles(blobs: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Return the pickled weights at the top level of the repository, with their index."""
    names = choose_pickles([blob.name for blob in blobs if "/" not in blob.name])
    return tuple(blob for blob in blobs if blob.name in names)


def _choose_pickles(
    spec: Spec, blobs: Sequence[HubFile], pickles: tuple[HubFile, ...], allowed: bool
) -> ChosenFiles:
    """Return a checkpoint with pickled weights. Raises UserError if pickles are not allowed, torch
    is missing, or it is not clear which pickles belong together.
    """
    names = [blob.name for blob in pickles]
    total = format_size(sum(blob.size for blob in pickles))
    remark = (
        f"{spec.repo} has pickled weights, which cannot be read in parts: "
        f"{total} are downloaded first and kept"
    )
    choice = _choose_checkpoint(spec, blobs, pickles, remark)
    if len(names) > 1 and INDEX_FILE not in names:
        raise UserError(
            f"{spec.repo} has {len(names)} pickled files and no {SINGLE_FILE}: "
            f"{', '.join(names[:3])}",
            hint="download the right one into a folder with its config.json, then give the folder",
        )
    if not allowed:
        raise pickles_not_allowed(spec.repo, names)
    require_torch()
    return choice


def _describe_models(first_files: Sequence[HubFile], blobs: Sequence[HubFile]) -> str:
    """Return a text that lists GGUFs with type, file name and total size. `first_files`: the GGUFs,
    each represented by its first shard.
    """
    descriptions = []
    for blob in first_files:
        total = sum(shard.size for shard in _all_shards(blob, blobs))
        descriptions.append(
            f"{type_in_name(blob.name) or blob.name} ({blob.name}, {format_size(total)})"
        )
    return ", ".join(descriptions)
