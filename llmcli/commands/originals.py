"""Where the float weights of a model are to be had: what another engine runs instead of a GGUF made
of them.

Nothing is fetched for it. A repository is believed to be what the catalog, the name or the file's
own metadata says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcli.catalog.fetch import Model, Wanted
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.container import Header

HUB = "https://huggingface.co/"
# Of the model itself; general.base_model names what it was trained from, which is another one.
KEYS = ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url")


@dataclass(frozen=True, slots=True)
class Original:
    """`model` is a repository, a folder, or (`floats` False) a GGUF where nothing else is known;
    `because` says how that is known. `revision` is the commit that was fetched, of a repository
    alone. What is not here has no facts: context 0, no heads, no template. `settings` and `system`
    are the catalog's.
    """

    name: str
    model: str
    floats: bool
    because: str
    revision: str = ""
    context: int = 0
    heads: int = 0
    template: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None


def original(ref: str, named: str | None, config: "Config", ui: "UI") -> Original:
    """What `ref` was made of; `named` is a repository or folder that the user says it is. Raises
    Refusal.
    """
    from llmcli.catalog import fetch
    from llmcli.commands.show import present
    from quant import container

    wanted = fetch.resolve(ref, config)
    model = present(wanted, config, ui, ref)
    header = container.read(model.path) if model and model.kind == "gguf" else None
    found = _place(wanted, named, model, header)
    name = wanted.ref.name if wanted.ref.kind != "path" else Path(wanted.ref.name).stem
    facts = _of_header(header) if header else _of_folder(model.path) if model else (0, 0, "")
    return Original(name, *found, *facts, wanted.settings, wanted.system)


def _place(
    wanted: "Wanted", named: str | None, model: "Model | None", header: "Header | None"
) -> tuple[str, bool, str, str]:
    if named:
        return named, True, "as --original says", ""
    if model and model.kind == "folder" and wanted.ref.kind == "path":
        return str(model.path), True, "a folder on this disk", ""
    hub = [spec for spec in wanted.sources if spec.kind == "hub"]
    for spec in hub:
        if spec.format == "safetensors" or (
            model and model.kind == "folder" and model.source == spec.label
        ):
            return spec.repo, True, "where the float weights come from", _commit(model, spec.label)
    if repo := (wanted.entry.original if wanted.entry else "") or (_told(header) if header else ""):
        return repo, True, "what the GGUF was made of", ""
    for spec in hub:
        if header or spec.quant or spec.file or "gguf" in spec.repo.lower():
            return (
                f"{spec.repo}:{spec.quant}" if spec.quant else spec.repo,
                False,
                "a repository of GGUF files",
                "",
            )
        return spec.repo, True, "by its name; it is not here to be looked at", ""
    return (
        str(model.path if model else wanted.ref.name),
        False,
        "a GGUF that does not tell what it was made of",
        "",
    )


def _commit(model: "Model | None", label: str) -> str:
    return (model.revision or "") if model and model.source == label else ""


def _told(header: "Header") -> str:
    """The repository that a file names as its own source; empty where it names none on the hub."""
    for key in KEYS:
        text = str(header.metadata.get(key, "")).removeprefix(HUB).strip("/")
        if text.count("/") == 1 and all(
            part.replace("-", "").replace("_", "").replace(".", "").isalnum()
            for part in text.split("/")
        ):
            return text
    return ""


def _of_header(header: "Header") -> tuple[int, int, str]:
    heads = header.number("attention.head_count") or 0
    return header.context_length, heads, str(header.metadata.get("tokenizer.chat_template") or "")


def _of_folder(path: Path) -> tuple[int, int, str]:
    from llmcli.catalog import facts

    config = facts.settings(path)
    return (
        _whole(config.get("max_position_embeddings")),
        _whole(config.get("num_attention_heads")),
        "",
    )


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
