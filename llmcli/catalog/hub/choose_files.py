"""Chooses the files of a hub repository that make up the model.

The result is one GGUF with its shards, or a float checkpoint. The rules for GGUFs are llama.cpp's
(common/download.cpp), but where llama.cpp takes the first of several matching files, the user must
choose. The choice depends only on names and sizes, and for pickles on whether torch is installed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.catalog.shard_names import parse_shard_name
from llmcli.catalog.spec import Spec
from llmcli.errors import UserError
from llmcli.units import format_size
from quant.checkpoint.pickles import (
    INDEX_FILE,
    SINGLE_FILE,
    choose_pickles,
    pickles_not_allowed,
    require_torch,
)

TYPE_SUFFIX = re.compile(r"[-.](\w+)$")
# how the names of GGUFs begin that are not models
AUXILIARY_PREFIXES = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
# files that a conversion needs beside the weights: data, never code or pickles
CONVERSION_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
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
    """One file of a repository: its path there, its size and its digest.

    The digest is a sha256 for LFS files and the git blob id for small ones.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files to fetch; for a GGUF, the first one is the file to load. `note` is printed before
    that.
    """

    kind: str
    files: tuple[HubFile, ...]
    note: str = ""


def choose_files(spec: Spec, blobs: Sequence[HubFile], allow_pickle: bool = False) -> ChosenFiles:
    """Choose the files for `spec`. Raises UserError that lists the alternatives.

    A GGUF is preferred unless `spec` requests safetensors. Pickled weights need `allow_pickle` and
    torch.
    """
    first = [blob for blob in blobs if _is_model(blob.name)]
    if spec.file or spec.quant.lower().endswith(".gguf"):
        return ChosenFiles("gguf", _named(spec.file or spec.quant, spec.repo, blobs))
    if first and spec.format != "safetensors":
        return _by_type(spec, first, blobs)
    if weights := _weights(blobs, allow_pickle):
        return _folder(spec, blobs, weights)
    if pickles := _pickles(blobs):
        return _pickled(spec, blobs, pickles, allow_pickle)
    kinds = sorted({blob.name.rpartition(".")[2] for blob in blobs if "." in blob.name})
    raise UserError(
        f"{spec.repo} contains neither GGUF nor safetensors (only {', '.join(kinds) or 'nothing'})",
        hint=f"search the hub for a GGUF of it: {spec.repo.split('/')[1]}-GGUF",
    )


def type_in_name(name: str) -> str:
    """Return the type in a file name: Model-Q4_K_M-00001-of-00002.gguf -> Q4_K_M."""
    shard = parse_shard_name(name)
    stem = shard.stem if shard else name[: -len(".gguf")]
    type_match = TYPE_SUFFIX.search(stem)
    return type_match[1].upper() if type_match else ""


def _is_model(name: str) -> bool:
    shard = parse_shard_name(name)
    base = name.rpartition("/")[2]
    return (
        name.lower().endswith(".gguf")
        and not (shard and shard.number != 1)
        and not any(word in base for word in AUXILIARY_PREFIXES)
    )


def _by_type(spec: Spec, first: Sequence[HubFile], blobs: Sequence[HubFile]) -> ChosenFiles:
    for wanted in [spec.quant] if spec.quant else ["Q4_K_M", "Q8_0"]:
        names = [wanted, wanted.removesuffix("_M")] if wanted.endswith("_K_M") else [wanted]
        for name in names:
            matches = [blob for blob in first if type_in_name(blob.name) == name]
            matches = matches or [
                blob
                for blob in first
                if re.search(re.escape(name) + "[.-]", blob.name, re.IGNORECASE)
            ]
            if len(matches) > 1:
                raise UserError(
                    f"{spec.repo}:{name} matches {_listing(matches, blobs)}",
                    hint=f"choose one: {spec.repo}:{matches[0].name}",
                )
            if matches:
                note = (
                    ""
                    if wanted == (spec.quant or "Q4_K_M")
                    else f"{spec.repo} has no Q4_K_M; taking {matches[0].name}"
                )
                return ChosenFiles("gguf", _shards(matches[0], blobs), note=note)
    if spec.quant:
        raise UserError(
            f"{spec.repo} has no {spec.quant}; it has {_listing(first, blobs)}",
            hint=f"for example: {spec.repo}:{type_in_name(first[0].name) or first[0].name}",
        )
    return ChosenFiles(
        "gguf",
        _shards(first[0], blobs),
        note=f"{spec.repo} has no Q4_K_M; taking {first[0].name}",
    )


def _named(name: str, repo: str, blobs: Sequence[HubFile]) -> tuple[HubFile, ...]:
    for blob in blobs:
        if blob.name.lower() == name.lower():
            return _shards(blob, blobs)
    ggufs = [blob for blob in blobs if _is_model(blob.name)]
    raise UserError(
        f"{repo} has no file {name}",
        hint=f"it has {_listing(ggufs, blobs)}" if ggufs else "it has no GGUF at all",
    )


def _shards(first: HubFile, blobs: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Return all shards in order if `first` is a shard, else `first` alone. Raises UserError."""
    shard = parse_shard_name(first.name)
    if not shard:
        return (first,)
    table = {blob.name: blob for blob in blobs}
    if missing := [name for name in shard.all_names if name not in table]:
        raise UserError(
            f"{', '.join(missing[:3])} of the split model {first.name} "
            "is missing in the repository",
            hint="choose another type",
        )
    return tuple(table[name] for name in shard.all_names)


def _folder(
    spec: Spec, blobs: Sequence[HubFile], weights: tuple[HubFile, ...], remark: str = ""
) -> ChosenFiles:
    """Return the weights and the files that a conversion needs beside them."""
    conversion_files = tuple(blob for blob in blobs if blob.name in CONVERSION_FILES)
    if not any(blob.name == "config.json" for blob in conversion_files):
        raise UserError(
            f"{spec.repo} has weights but no config.json",
            hint="without config.json a model cannot be converted",
        )
    return ChosenFiles("folder", conversion_files + weights, remark)


def _weights(blobs: Sequence[HubFile], allow_pickle: bool) -> tuple[HubFile, ...]:
    """Return model*.safetensors with their index, or else all safetensors at the top level.

    Safetensors with other names cannot always be read. If the repository also has pickles and they
    are allowed, the result is therefore empty, so that the pickles are used.
    """
    top_level = [
        blob
        for blob in blobs
        if "/" not in blob.name and blob.name.endswith((".safetensors", ".safetensors.index.json"))
    ]
    model_files = [blob for blob in top_level if blob.name.startswith("model")]
    return tuple(model_files or (() if allow_pickle and _pickles(blobs) else top_level))


def _pickles(blobs: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Return the pickled weights at the top level, with their index."""
    names = choose_pickles([blob.name for blob in blobs if "/" not in blob.name])
    return tuple(blob for blob in blobs if blob.name in names)


def _pickled(
    spec: Spec, blobs: Sequence[HubFile], pickles: tuple[HubFile, ...], allowed: bool
) -> ChosenFiles:
    """Return a checkpoint of pickles. Raises UserError if it cannot be read."""
    names = [blob.name for blob in pickles]
    total = format_size(sum(blob.size for blob in pickles))
    remark = (
        f"{spec.repo} has pickled weights, which cannot be read in parts: "
        f"{total} are downloaded first and kept"
    )
    choice = _folder(spec, blobs, pickles, remark)
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


def _listing(first: Sequence[HubFile], blobs: Sequence[HubFile]) -> str:
    """Describe several models, each given by its first file: type, file name and total size."""
    descriptions = []
    for blob in first:
        total = sum(shard.size for shard in _shards(blob, blobs))
        descriptions.append(
            f"{type_in_name(blob.name) or blob.name} ({blob.name}, {format_size(total)})"
        )
    return ", ".join(descriptions)
