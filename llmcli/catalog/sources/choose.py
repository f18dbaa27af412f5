"""Which files of a hub repository make the model: one GGUF with its shards, or a float checkpoint.

The rules for GGUFs are llama.cpp's (common/download.cpp); where several files fit, it takes the
first and we ask. This module looks at names and sizes, and whether there is torch for pickles that
are allowed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmcli.catalog.catalog import Spec
from llmcli.errors import UserError
from llmcli.units import size
from quant import pickled

SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
TAG = re.compile(r"[-.](\w+)$")
HELPERS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # GGUFs that are no models
SIDE = {  # what converting needs beside the weights: data, never code or pickles
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
class Blob:
    """One file of a repository: its path there, its size, and what it is verified by (sha256 for
    LFS files, the git blob id for small ones)."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The files to fetch, of a GGUF the one to load first; `remark` is what the user should know."""

    kind: str
    files: tuple[Blob, ...]
    remark: str = ""


def choose(spec: Spec, blobs: Sequence[Blob], allow_pickle: bool = False) -> Choice:
    """Pick what `spec` asks for out of a repository; raises Refusal naming what there is instead.

    Pickled weights come last, and only where they are allowed and can be read: else Pickled is
    raised.
    """
    first = [blob for blob in blobs if _is_model(blob.name)]
    if spec.file or spec.quant.lower().endswith(".gguf"):
        return Choice("gguf", _named(spec.file or spec.quant, spec.repo, blobs))
    if first and spec.format != "safetensors":
        return _by_type(spec, first, blobs)
    if weights := _weights(blobs, allow_pickle):
        return _folder(spec, blobs, weights)
    if pickles := _pickles(blobs):
        return _pickled(spec, blobs, pickles, allow_pickle)
    kinds = sorted({blob.name.rpartition(".")[2] for blob in blobs if "." in blob.name})
    raise UserError(
        f"{spec.repo} holds neither GGUF nor safetensors (only {', '.join(kinds) or 'nothing'})",
        hint=f"search the hub for a GGUF of it: {spec.repo.split('/')[1]}-GGUF",
    )


def tag(name: str) -> str:
    """The type in a file's name: Model-Q4_K_M-00001-of-00002.gguf -> Q4_K_M."""
    match = SPLIT.fullmatch(name)
    stem = match["stem"] if match else name[: -len(".gguf")]
    found = TAG.search(stem)
    return found[1].upper() if found else ""


def _is_model(name: str) -> bool:
    split = SPLIT.fullmatch(name)
    base = name.rpartition("/")[2]
    return (
        name.lower().endswith(".gguf")
        and not (split and int(split["number"]) != 1)
        and not any(word in base for word in HELPERS)
    )


def _by_type(spec: Spec, first: Sequence[Blob], blobs: Sequence[Blob]) -> Choice:
    for wanted in [spec.quant] if spec.quant else ["Q4_K_M", "Q8_0"]:
        names = [wanted, wanted.removesuffix("_M")] if wanted.endswith("_K_M") else [wanted]
        for name in names:
            fits = [blob for blob in first if tag(blob.name) == name]
            fits = fits or [
                blob
                for blob in first
                if re.search(re.escape(name) + "[.-]", blob.name, re.IGNORECASE)
            ]
            if len(fits) > 1:
                raise UserError(
                    f"{spec.repo}:{name} fits {_listing(fits, blobs)}",
                    hint=f"name one: {spec.repo}:{fits[0].name}",
                )
            if fits:
                remark = (
                    ""
                    if wanted == (spec.quant or "Q4_K_M")
                    else f"{spec.repo} has no Q4_K_M; taking {fits[0].name}"
                )
                return Choice("gguf", _shards(fits[0], blobs), remark=remark)
    if spec.quant:
        raise UserError(
            f"{spec.repo} has no {spec.quant}; it has {_listing(first, blobs)}",
            hint=f"for example: {spec.repo}:{tag(first[0].name) or first[0].name}",
        )
    return Choice(
        "gguf",
        _shards(first[0], blobs),
        remark=f"{spec.repo} has no Q4_K_M; taking {first[0].name}",
    )


def _named(name: str, repo: str, blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    for blob in blobs:
        if blob.name.lower() == name.lower():
            return _shards(blob, blobs)
    ggufs = [blob for blob in blobs if _is_model(blob.name)]
    raise UserError(
        f"{repo} has no file {name}",
        hint=f"it has {_listing(ggufs, blobs)}" if ggufs else "it has no GGUF at all",
    )


def _shards(first: Blob, blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """The file, or all shards of its split in order."""
    split = SPLIT.fullmatch(first.name)
    if not split:
        return (first,)
    wanted = [
        f"{split['stem']}-{number:05}-of-{split['count']}.gguf"
        for number in range(1, int(split["count"]) + 1)
    ]
    table = {blob.name: blob for blob in blobs}
    if missing := [name for name in wanted if name not in table]:
        raise UserError(
            f"the split model {first.name} lacks {', '.join(missing[:3])} in its repository",
            hint="choose another type",
        )
    return tuple(table[name] for name in wanted)


def _folder(
    spec: Spec, blobs: Sequence[Blob], weights: tuple[Blob, ...], remark: str = ""
) -> Choice:
    """The weights with what converting needs beside them."""
    side = tuple(blob for blob in blobs if blob.name in SIDE)
    if not any(blob.name == "config.json" for blob in side):
        raise UserError(
            f"{spec.repo} has weights but no config.json",
            hint="that is no model that can be converted",
        )
    return Choice("folder", side + weights, remark)


def _weights(blobs: Sequence[Blob], allow_pickle: bool) -> tuple[Blob, ...]:
    """model*.safetensors with their index; where there are none, any other safetensors at the top.

    Those cannot be read in every case: pickles go before them where they are allowed.
    """
    top = [
        blob
        for blob in blobs
        if "/" not in blob.name and blob.name.endswith((".safetensors", ".safetensors.index.json"))
    ]
    named = [blob for blob in top if blob.name.startswith("model")]
    return tuple(named or (() if allow_pickle and _pickles(blobs) else top))


def _pickles(blobs: Sequence[Blob]) -> tuple[Blob, ...]:
    """The pickled weights at the top, with their index."""
    names = pickled.chosen([blob.name for blob in blobs if "/" not in blob.name])
    return tuple(blob for blob in blobs if blob.name in names)


def _pickled(spec: Spec, blobs: Sequence[Blob], pickles: tuple[Blob, ...], allowed: bool) -> Choice:
    """A checkpoint of pickles, where it is allowed and torch is there to read it."""
    names = [blob.name for blob in pickles]
    whole = size(sum(blob.size for blob in pickles))
    remark = f"{spec.repo} has pickled weights, which cannot be read in parts: {whole} come here first, and stay"
    choice = _folder(spec, blobs, pickles, remark)
    if len(names) > 1 and pickled.INDEX not in names:
        raise UserError(
            f"{spec.repo} has {len(names)} pickled files and no {pickled.SINGLE}: {', '.join(names[:3])}",
            hint="download the right one into a folder with its config.json, and name the folder",
        )
    if not allowed:
        raise pickled.unasked(spec.repo, names)
    pickled.need_torch()
    return choice


def _listing(first: Sequence[Blob], blobs: Sequence[Blob]) -> str:
    return ", ".join(
        f"{tag(blob.name) or blob.name} ({blob.name}, {size(sum(part.size for part in _shards(blob, blobs)))})"
        for blob in first
    )
