"""Finds the float weights from which a model was made, for engines that do not run GGUF.

Nothing is downloaded or verified. The repository of the weights is named by the user, the catalog,
the model's name or the GGUF's metadata.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel, ResolvedRef
    from llmcli.catalog.spec import Spec
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

HUB_URL = "https://huggingface.co/"
# metadata keys of the model's own repository (general.base_model is the model that it was trained
# from, which has different weights)
SOURCE_KEYS = (
    "general.source.huggingface.repository",
    "general.source.repo_url",
    "general.repo_url",
)


@dataclass(frozen=True, slots=True)
class OriginalWeights:
    """The weights that another engine can load.

    - `model`: a hub repository or a folder; if no float weights are known, a GGUF.
    - `is_float`: False for a GGUF.
    - `reason`: how the weights were found.
    - `revision`: the commit of a downloaded repository.
    - `context_length`, `n_heads`, `template`: 0, 0 and "" if the model is not on this disk.
    - `settings`, `system`: the alias's sampling settings and system prompt.
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
    """Return the float weights from which the model `ref` was made. `repository`: the repository or
    folder that the user named with --original. Raises UserError.
    """
    from llmcli.catalog import fetch
    from llmcli.model_loader.installed_model import installed_model
    from quant.model_file import read_header

    resolved = fetch.resolve_ref(ref, config)
    model = installed_model(resolved, config, ui, ref)
    header = read_header.read_header(model.path) if model and model.kind == "gguf" else None
    search = _Search(resolved, repository, model, header)
    weights = next(weights for finder in FINDERS if (weights := finder(search)))
    shape = (
        _shape_of_header(header) if header else _shape_of_folder(model.path) if model else _Shape()
    )
    return replace(
        weights,
        context_length=shape.context_length,
        n_heads=shape.n_heads,
        template=shape.template,
        settings=resolved.settings,
        system=resolved.system,
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """The input of the functions in FINDERS.

    - `resolved`: the model's name, looked up in the catalog.
    - `repository`: the value of --original.
    - `model`, `header`: the model on this disk and its GGUF header; None: there is none.
    """

    resolved: "ResolvedRef"
    repository: str | None
    model: "FetchedModel | None"
    header: "ModelHeader | None"

    @property
    def name(self) -> str:
        ref = self.resolved.ref
        return Path(ref.name).stem if ref.kind == "path" else ref.name

    @property
    def hub_sources(self) -> "list[Spec]":
        return [spec for spec in self.resolved.sources if spec.kind == "hub"]


def _find_user_repository(search: _Search) -> OriginalWeights | None:
    if not search.repository:
        return None
    return OriginalWeights(search.name, search.repository, True, "given by --original")


def _find_local_folder(search: _Search) -> OriginalWeights | None:
    model = search.model
    if model is None or model.kind != "folder" or search.resolved.ref.kind != "path":
        return None
    return OriginalWeights(search.name, str(model.path), True, "a folder on this disk")


def _find_float_source(search: _Search) -> OriginalWeights | None:
    """Return a hub repository of safetensors: one that the catalog marks as such, or one that was
    downloaded as a checkpoint folder.
    """
    model = search.model
    for spec in search.hub_sources:
        installed = model if model and model.source == spec.label else None
        if spec.format == "safetensors" or (installed and installed.kind == "folder"):
            commit = (installed.revision or "") if installed else ""
            reason = "the source of the float weights"
            return OriginalWeights(search.name, spec.repo, True, reason, commit)
    return None


def _find_source_of_gguf(search: _Search) -> OriginalWeights | None:
    entry = search.resolved.entry
    repository = entry.original if entry else ""
    if not repository and search.header:
        repository = _repository_in_metadata(search.header)
    if not repository:
        return None
    return OriginalWeights(search.name, repository, True, "the source of the GGUF")


def _find_gguf_repository(search: _Search) -> OriginalWeights | None:
    spec = next(iter(search.hub_sources), None)
    if spec is None or not (
        search.header or spec.quant or spec.file or "gguf" in spec.repo.lower()
    ):
        return None
    name = f"{spec.repo}:{spec.quant}" if spec.quant else spec.repo
    return OriginalWeights(search.name, name, False, "a repository of GGUF files")


def _guess_repository(search: _Search) -> OriginalWeights | None:
    spec = next(iter(search.hub_sources), None)
    if spec is None:
        return None
    reason = "guessed from its name; it is not on this disk"
    return OriginalWeights(search.name, spec.repo, True, reason)


def _use_gguf(search: _Search) -> OriginalWeights:
    file = str(search.model.path if search.model else search.resolved.ref.name)
    return OriginalWeights(search.name, file, False, "a GGUF that does not name its source")


# in order of preference; the last function never returns None
FINDERS: tuple[Callable[[_Search], OriginalWeights | None], ...] = (
    _find_user_repository,
    _find_local_folder,
    _find_float_source,
    _find_source_of_gguf,
    _find_gguf_repository,
    _guess_repository,
    _use_gguf,
)


@dataclass(frozen=True, slots=True)
class _Shape:
    context_length: int = 0
    n_heads: int = 0
    template: str = ""


def _repository_in_metadata(header: "ModelHeader") -> str:
    """Return the hub repository that the GGUF's metadata names as its source; "" if there
    is none.
    """
    for key in SOURCE_KEYS:
        text = str(header.metadata.get(key, "")).removeprefix(HUB_URL).strip("/")
        if text.count("/") == 1 and all(
            part.replace("-", "").replace("_", "").replace(".", "").isalnum()
            for part in text.split("/")
        ):
            return text
    return ""


def _shape_of_header(header: "ModelHeader") -> _Shape:
    heads = header.get_int("attention.head_count") or 0
    template = str(header.metadata.get("tokenizer.chat_template") or "")
    return _Shape(header.context_length, heads, template)


def _shape_of_folder(path: Path) -> _Shape:
    from llmcli.catalog import model_facts

    config = model_facts.read_checkpoint_config(path)
    return _Shape(
        _natural_number(config.get("max_position_embeddings")),
        _natural_number(config.get("num_attention_heads")),
    )


def _natural_number(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
