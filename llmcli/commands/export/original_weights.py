"""Finds the float weights that a model was made from, for engines that do not run GGUF.

Nothing is downloaded or verified: the repository is the one that the catalog, the name or the
file's metadata states.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcli.catalog.fetch import Model, Wanted
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

HUB_URL = "https://huggingface.co/"
# keys of the model itself; general.base_model names the model that it was trained from
SOURCE_KEYS = (
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.repo_url",
)


@dataclass(frozen=True, slots=True)
class OriginalWeights:
    """The weights that another engine can load.

    `model`: a repository, a folder, or (`is_float` False) a GGUF if nothing else is known;
    `reason`: how it was found; `revision`: commit of a downloaded repository. A model that is not
    on this disk has context 0, 0 heads and no template. `settings` and `system` are from the
    catalog.
    """

    name: str
    model: str
    is_float: bool
    reason: str
    revision: str = ""
    context_length: int = 0
    n_heads: int = 0
    template: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None


def find_original_weights(
    ref: str, repository: str | None, config: "Config", ui: "UI"
) -> OriginalWeights:
    """Return the float weights of `ref`; `repository` is the repository or folder given by the
    user. Raises UserError.
    """
    from llmcli.catalog import fetch
    from llmcli.model_loader.installed_model import installed_model
    from quant.model_file import read_header

    wanted = fetch.resolve(ref, config)
    model = installed_model(wanted, config, ui, ref)
    header = read_header.read_header(model.path) if model and model.kind == "gguf" else None
    found = _place(wanted, repository, model, header)
    name = wanted.ref.name if wanted.ref.kind != "path" else Path(wanted.ref.name).stem
    facts = _of_header(header) if header else _of_folder(model.path) if model else (0, 0, "")
    return OriginalWeights(name, *found, *facts, wanted.settings, wanted.system)


def _place(
    wanted: "Wanted", named: str | None, model: "Model | None", header: "ModelHeader | None"
) -> tuple[str, bool, str, str]:
    if named:
        return named, True, "given by --original", ""
    if model and model.kind == "folder" and wanted.ref.kind == "path":
        return str(model.path), True, "a folder on this disk", ""
    hub = [spec for spec in wanted.sources if spec.kind == "hub"]
    for spec in hub:
        if spec.format == "safetensors" or (
            model and model.kind == "folder" and model.source == spec.label
        ):
            return spec.repo, True, "the source of the float weights", _commit(model, spec.label)
    if repo := (wanted.entry.original if wanted.entry else "") or (_told(header) if header else ""):
        return repo, True, "the source of the GGUF", ""
    for spec in hub:
        if header or spec.quant or spec.file or "gguf" in spec.repo.lower():
            return (
                f"{spec.repo}:{spec.quant}" if spec.quant else spec.repo,
                False,
                "a repository of GGUF files",
                "",
            )
        return spec.repo, True, "guessed from its name; it is not on this disk", ""
    return (
        str(model.path if model else wanted.ref.name),
        False,
        "a GGUF that does not name its source",
        "",
    )


def _commit(model: "Model | None", label: str) -> str:
    return (model.revision or "") if model and model.source == label else ""


def _told(header: "ModelHeader") -> str:
    """Return the hub repository that the file's metadata names as its source, "" if there is
    none.
    """
    for key in SOURCE_KEYS:
        text = str(header.metadata.get(key, "")).removeprefix(HUB_URL).strip("/")
        if text.count("/") == 1 and all(
            part.replace("-", "").replace("_", "").replace(".", "").isalnum()
            for part in text.split("/")
        ):
            return text
    return ""


def _of_header(header: "ModelHeader") -> tuple[int, int, str]:
    heads = header.get_int("attention.head_count") or 0
    return header.context_length, heads, str(header.metadata.get("tokenizer.chat_template") or "")


def _of_folder(path: Path) -> tuple[int, int, str]:
    from llmcli.catalog import model_facts

    config = model_facts.settings(path)
    return (
        _whole(config.get("max_position_embeddings")),
        _whole(config.get("num_attention_heads")),
        "",
    )


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
