"""Files beside a model that llama.cpp's converter writes and llmcli does not run: the vision or audio
part of a model (mmproj), and LoRA adapters.

They are written as they are. Their metadata names the files that they were made from. By it, llmcli
recognizes a finished file, and it replaces no file that it has not made.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.atomic_files import sync_folder, write_error
from llmcli.catalog import converter_source
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.llama_converter import converter_classes, missing_tensors
from llmcli.model_loader.llama_converter.run_converter import (
    GGUF_HINT,
    ConverterRequest,
    describe_cost,
    prepare_converter,
    start_conversion,
)
from quant.checkpoint.adapters import ADAPTER_CONFIG
from quant.checkpoint.folder import CheckpointFolder
from quant.gguf.header import TensorInfo
from quant.model_file import read_header
from quant.quantize.output_files import (
    find_written,
    require_output_name,
    require_writable_file,
)
from quant.quantize.plan import SETTINGS_KEY, SOURCE_KEY
from quant.source.blob import LocalFile, read_samples

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader
    from quant.native.ggml import F32

MAX_CONFIG_BYTES = 1 << 20  # of a JSON file that is part of the fingerprint
CHUNK_BYTES = 16 << 20  # of a tensor that are read at once
# The bits of the exponent of each float type, and the size of a value: all set means NaN or
# infinite.
EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class SideFile:
    """A written file, or the one that would be written if `is_planned`. `is_present`: an earlier run
    had written it.
    """

    path: Path
    nbytes: int
    header: "ModelHeader"
    is_planned: bool = False
    is_present: bool = False


@dataclass(frozen=True, slots=True)
class _SideRequest:
    """What to write: the request to the converter, the output file, the type of its matrices, the
    checkpoint's files that decide its bytes, a check of its header, and a function of the header that
    returns the tensors which the converter leaves out.
    """

    conversion: ConverterRequest
    out: Path
    outtype: str
    files: tuple[Path, ...]
    check: "Callable[[ModelHeader], None]"
    read_missing: "Callable[[ModelHeader], Mapping[str, F32]]" = lambda header: {}


def check_mmproj(folder: Path, config: "Config", ui: "UI") -> None:
    """Raise UserError if no mmproj file can be made of a checkpoint: packages are missing, or
    llama.cpp's converter does not know its vision or audio part. The converter is downloaded if
    it is missing.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--mmproj applies to checkpoint folders; {folder} is not a folder",
            hint="leave out --mmproj",
        )
    converter = prepare_converter(config, ui)
    if converter_classes.has_mmproj_class(folder, converter) is False:
        raise UserError(
            f"{folder} has no vision or audio part that llama.cpp's converter "
            f"({converter_source.describe_converter(config)}) knows",
            hint="leave out --mmproj",
        )


def write_mmproj(
    folder: Path,
    model_file: Path,
    name: str,
    config: "Config",
    ui: "UI",
    *,
    force: bool,
    dry_run: bool,
) -> SideFile:
    """Convert the vision or audio part of a checkpoint to the file mmproj-NAME.gguf beside
    `model_file`. `name`: the model's name. `force`: replace any file there. `dry_run`: write
    nothing. Raises UserError.
    """
    out = model_file.with_name(f"mmproj-{name}.gguf")
    conversion = ConverterRequest(
        folder,
        "the vision or audio part",
        converter_source.CONVERT_SCRIPT,
        (str(folder), "--mmproj", "--outtype", "auto"),
    )
    files = tuple(sorted(folder.glob("*.safetensors"))) or tuple(sorted(folder.glob("*.bin")))
    request = _SideRequest(
        conversion,
        out,
        "auto",
        files,
        _check_mmproj_header,
        partial(missing_tensors.read_missing_tensors, folder),
    )
    converter = prepare_converter(config, ui)
    return _write(request, converter, config, ui, force=force, dry_run=dry_run)


def write_adapter(
    folder: Path,
    base: Path,
    out: Path,
    outtype: str,
    config: "Config",
    ui: "UI",
    *,
    force: bool,
    dry_run: bool,
) -> SideFile:
    """Convert a LoRA adapter, as the peft package saves it, to the file `out`. `base`: the folder
    of the model that it changes, of which only config.json and the tokenizer's files are read.

    `force`: replace any file there. `dry_run`: write nothing. Raises UserError.
    """
    converter = prepare_converter(config, ui)
    converter_classes.require_text_class(base, converter, config)
    conversion = ConverterRequest(
        folder,
        "the adapter",
        converter_source.LORA_SCRIPT,
        (str(folder), "--base", str(base), "--outtype", outtype),
    )
    weights = tuple(folder / name for name in ADAPTER_FILES if (folder / name).is_file())
    files = (*weights[:1], base / "config.json")
    request = _SideRequest(conversion, out, outtype, files, _check_adapter_header)
    return _write(request, converter, config, ui, force=force, dry_run=dry_run)


def check_adapter(folder: Path, *, allow_pickle: bool) -> dict[str, Any]:
    """Return the content of a LoRA adapter's configuration. Raises UserError if the folder has no
    adapter, or one that a GGUF adapter cannot hold.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", hint="name the folder of a LoRA adapter")
    files = CheckpointFolder(folder)
    if not files.has_file(ADAPTER_CONFIG):
        raise UserError(
            f"{folder} has no {ADAPTER_CONFIG}, so it is no LoRA adapter",
            hint="name a folder that the peft package has saved",
        )
    values = files.read_json(ADAPTER_CONFIG)
    if not any(map(files.has_file, ADAPTER_FILES)):
        raise UserError(
            f"{folder} has no weights: neither {' nor '.join(ADAPTER_FILES)}",
            hint="fetch the whole adapter again",
        )
    if not files.has_file(ADAPTER_FILES[0]) and not allow_pickle:
        from quant.checkpoint.pickles import pickles_not_allowed

        raise pickles_not_allowed(folder, ADAPTER_FILES[1:])
    # A GGUF adapter has one number, alpha; llama.cpp scales each product by alpha / rank.
    reasons = {
        f"its kind is {values.get('peft_type')}": values.get("peft_type", "LORA") != "LORA",
        "use_dora is set": values.get("use_dora"),
        "use_rslora is set": values.get("use_rslora"),
        "alpha_pattern gives tensors different alphas": values.get("alpha_pattern"),
        "fan_in_fan_out is set": values.get("fan_in_fan_out"),
        "lora_bias is set": values.get("lora_bias"),
        "it trains biases": values.get("bias", "none") not in ("none", None),
        "it replaces whole modules (modules_to_save)": values.get("modules_to_save"),
        "it has no lora_alpha": not isinstance(values.get("lora_alpha"), int | float),
    }
    if problems := [reason for reason, is_set in reasons.items() if is_set]:
        raise UserError(
            f"{folder} cannot be a GGUF adapter: {'; '.join(problems)}",
            hint="merge it into its model: merge_and_unload() of the peft package, then "
            "save_pretrained()",
        )
    return values


def _write(
    request: _SideRequest,
    converter: Path,
    config: "Config",
    ui: "UI",
    *,
    force: bool,
    dry_run: bool,
) -> SideFile:
    """Run the converter in the folder `converter` and write its file, unless that is there already.
    Raises UserError.
    """
    out, version = request.out, converter_source.describe_converter(config)
    require_output_name(out)
    settings = json.dumps(
        {"converter": converter_source.released_version(config), "type": request.outtype}
    )
    source = _fingerprint(request.files)
    present = None if force else find_written(out, source, settings)
    if present and not request.read_missing(present):
        request.check(present)
        ui.note(f"{out} is up to date: nothing to do (--force makes it again)")
        return SideFile(out, out.stat().st_size, present, is_present=True)
    if not dry_run:
        require_writable_file(request.files, out, force=force)
    metadata = {SOURCE_KEY: source, SETTINGS_KEY: settings}
    described = replace(request.conversion, metadata=metadata)
    with start_conversion(described, converter, config, ui) as conversion:
        header = read_header.read_header(conversion.header_file)
        request.check(header)
        missing = request.read_missing(header)
        nbytes = conversion.nbytes + sum(values.nbytes for values in missing.values())
        ui.note(
            f"llama.cpp's converter ({version}) converts {described.kind} of {described.name}: "
            f"{describe_cost(conversion)}"
        )
        if dry_run:
            return SideFile(out, nbytes, header, is_planned=True)
        conversion.finish(ui)
        if missing:
            missing_tensors.add_tensors(conversion.file, missing)
        header = read_header.read_header(conversion.file)
        request.check(header)
        _require_numbers(header)
        _move(conversion.file, out)
    return SideFile(out, out.stat().st_size, read_header.read_header(out))


def _fingerprint(files: Sequence[Path]) -> str:
    """Return a digest of the files: of samples of the weights, and of the small JSON files in their
    folder.
    """
    digest = hashlib.sha256()
    for path in sorted({path for file in files for path in file.parent.glob("*.json")}):
        if path.stat().st_size <= MAX_CONFIG_BYTES:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    blobs = [LocalFile(file) for file in files]
    for blob in blobs:
        digest.update(f"{blob.path.name} {blob.size}".encode())
    for sample in read_samples(blobs):
        digest.update(sample.tobytes())
    return digest.hexdigest()[:32]


def _check_mmproj_header(header: "ModelHeader") -> None:
    """Raise UserError unless a file is an mmproj file with a vision or audio encoder."""
    metadata = header.metadata
    encoders = [metadata.get(f"clip.has_{kind}_encoder") for kind in ("vision", "audio")]
    if header.architecture != "clip" or True not in encoders or not header.tensors:
        raise UserError(
            "llama.cpp's converter has written a file without a vision or audio encoder",
            hint="leave out --mmproj",
        )


def _check_adapter_header(header: "ModelHeader") -> None:
    """Raise UserError unless a file is a LoRA adapter whose matrices come in fitting pairs."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    kinds = header.metadata.get("general.type"), header.metadata.get("adapter.type")
    pairs = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    unpaired = [
        name
        for name in pairs
        if f"{name}.lora_b" not in tensors
        or _rank(tensors[f"{name}.lora_a"]) != tensors[f"{name}.lora_b"].shape[0]
    ]
    if kinds != ("adapter", "lora") or not pairs or unpaired:
        reason = f"{unpaired[0]} has no fitting pair" if unpaired else "it has no adapter"
        raise UserError(
            f"llama.cpp's converter has written a file that is no LoRA adapter: {reason}",
            hint="check the adapter's files",
        )


def _rank(matrix: TensorInfo) -> int:
    """Return the rank of a pair, of which this is the first matrix. That of the embedding is stored
    in the other order (convert_lora_to_gguf.py).
    """
    is_embedding = matrix.name.startswith("token_embd.")
    return matrix.shape[0] if is_embedding else matrix.shape[1]


def _require_numbers(header: "ModelHeader") -> None:
    """Raise UserError if a float tensor contains NaN or infinite values."""
    import numpy as np

    for tensor in header.tensors:
        if tensor.type not in EXPONENTS:
            continue
        dtype, mask = EXPONENTS[tensor.type]
        step = CHUNK_BYTES // np.dtype(dtype).itemsize
        for first in range(0, tensor.elements, step):
            values = np.fromfile(
                tensor.file,
                dtype,
                min(step, tensor.elements - first),
                offset=tensor.offset + first * np.dtype(dtype).itemsize,
            )
            if ((values & mask) == mask).any():
                raise UserError(f"{tensor.name} contains NaN or infinite values", hint=GGUF_HINT)


def _move(file: Path, out: Path) -> None:
    """Move a finished file to `out`, which may be on another disk. Raises UserError."""
    part = out.with_name(f".{out.name}.part")
    try:
        shutil.move(file, part)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise write_error(out, error) from None
    sync_folder(out.parent)
