"""`llmcli convert --lora`: a LoRA adapter of the peft package becomes a GGUF adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError
from llmcli.model_loader.llama_converter import side_files
from llmcli.model_loader.llama_converter.side_files import SideFile
from llmcli.model_loader.quantize_file import OutputSettings, find_model
from llmcli.text_input import expand_path
from quant.checkpoint import safetensors
from quant.model_file.model_header import ModelHeader
from quant.quantize.output_files import cached_repo
from quant.source.blob import LocalFile

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """A request to convert the adapter in `folder`. `base`: the model that it changes, as a path or
    name; None: the one that the adapter names. `outtype`: the type of the matrices; "auto": that of
    the adapter.
    """

    folder: Path
    base: str | None
    outtype: str
    allow_pickle: bool
    output: OutputSettings


@dataclass(frozen=True, slots=True)
class AdapterResult:
    """The file of an adapter. `base`: the folder of the model that it changes; `alpha`: its scale,
    which llama.cpp divides by the rank.
    """

    file: SideFile
    base: Path
    alpha: float

    @property
    def header(self) -> ModelHeader:
        """The header of the file."""
        assert self.file.header is not None
        return self.file.header


def convert_adapter(request: AdapterRequest, config: "Config", ui: "UI") -> AdapterResult:
    """Convert a LoRA adapter with llama.cpp's converter. Raises UserError."""
    folder = expand_path(str(request.folder)).absolute()
    values = side_files.check_adapter(folder, allow_pickle=request.allow_pickle)
    base = _find_base(folder, request.base, values, config, ui)
    file = side_files.write_adapter(
        folder,
        base,
        request.output.out or default_path(folder, "lora"),
        _adapter_type(folder) if request.outtype == "auto" else request.outtype,
        config,
        ui,
        force=request.output.force,
        dry_run=request.output.dry_run,
    )
    return AdapterResult(file, base, float(values["lora_alpha"]))


def _find_base(
    folder: Path, name: str | None, values: dict[str, Any], config: "Config", ui: "UI"
) -> Path:
    """Return the folder of the model that an adapter changes. Of a model on the hub, only the small
    files are fetched. `values`: the adapter's configuration. Raises UserError.
    """
    hint = f"name the checkpoint that it changes: llmcli convert BASE --lora {folder}"
    if name is None:
        name = values.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise UserError(f"{folder} does not name the model that it changes", hint=hint)
    model = find_model(name, config, ui)
    path = model.path if model else expand_path(name).absolute()
    if not (path / "config.json").is_file():
        raise UserError(
            f"{name}, which the adapter changes, is no checkpoint folder with a config.json",
            hint=hint,
        )
    return path


def default_path(folder: Path, kind: str) -> Path:
    """Return the path NAME-KIND.gguf of what is made of a folder, beside it; in the current folder
    if that is in the Hugging Face cache.
    """
    repo = cached_repo(folder)
    name = repo.rpartition("/")[2] if repo else folder.name
    return (Path().absolute() if repo else folder.parent) / f"{name}-{kind}.gguf"


def _adapter_type(folder: Path) -> str:
    """Return the type of an adapter's first float matrix; f32 for pickled weights."""
    file = folder / side_files.ADAPTER_FILES[0]
    if not file.is_file():
        return "f32"
    dtypes = (tensor.dtype for tensor in safetensors.read_safetensors(LocalFile(file)))
    return next((d for d in dtypes if d in safetensors.FLOAT_DTYPES), "F32").lower()
