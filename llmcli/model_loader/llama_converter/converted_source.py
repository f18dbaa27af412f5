"""A checkpoint that llama.cpp's converter converts, as a Source: its metadata and tensors are those
of the GGUF that the converter writes.

The Source is complete as soon as the GGUF's header is. Its fingerprint is that of the header and of
samples of the checkpoint's own files, so that a finished or interrupted output of the same
checkpoint is recognized before any weight is converted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import converter_source
from llmcli.model_loader.llama_converter import converter_classes
from llmcli.model_loader.llama_converter.run_converter import (
    Conversion,
    ConverterRequest,
    describe_cost,
    prepare_converter,
    start_conversion,
)
from quant.checkpoint import pickles, safetensors
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import general_metadata
from quant.gguf.layout import encode_entry
from quant.model_file import load_checks, read_header
from quant.quantize.write import open_gguf
from quant.recipes.file_types import FLOAT_FILE_TYPES
from quant.source.blob import LocalFile
from quant.source.source import make_file_row_reader
from quant.tokenizer.tokenizer_files import TOKENIZER_FILES

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader
    from quant.source.source import Source

CONVERTER_KEY = "llmcli.convert.converter"
MMPROJ_NOTE = (
    "only the language part is converted; --mmproj makes a file of the vision or audio part, for "
    "llama-mtmd-cli"
)
VERIFIED_VOCABULARIES = ("gpt2", "llama", "t5", "bert")  # tokenizer.ggml.model
NO_VOCABULARY = ("none", "no_vocab")


class ConvertedCheckpoint:
    """A checkpoint in conversion. `source` can be planned; its weights can be read after
    `write_weights`.
    """

    def __init__(self, source: "Source", conversion: Conversion, ui: "UI") -> None:
        self.source = source
        self._conversion, self._ui = conversion, ui
        self._is_proven = False

    def write_weights(self) -> None:
        """Convert the weights, and check that llama.cpp computes numbers with them. Nothing is done
        the second time. Raises UserError.
        """
        from llmcli.model_loader.rehearsal.rehearse import rehearse_conversion

        if self._is_proven:
            return
        self._conversion.finish(self._ui)
        rehearse_conversion(self._conversion.file, self.source.name, self._ui)
        self._is_proven = True


@contextmanager
def convert_checkpoint(
    folder: Path,
    reason: str,
    config: "Config",
    ui: "UI",
    *,
    pre: str | None = None,
    allow_pickle: bool = False,
    no_mtp: bool = False,
    accept_tokenizer_differences: bool = False,
) -> Iterator[ConvertedCheckpoint]:
    """Start llama.cpp's converter on a checkpoint folder, and check the header that it writes:
    that llama.cpp can load it, and that it tokenizes as the checkpoint's own tokenizer does. Yield
    the checkpoint. What the converter writes is deleted when the with block ends.

    - `reason`: why this converter is used, for a note.
    - `pre`: llama.cpp's name of the pre-tokenizer that replaces the converter's.
    - `no_mtp`: whether to leave out the layers that predict further tokens.

    Raises UserError.
    """
    files, dtype = _read_weights(folder, allow_pickle=allow_pickle)
    converter = prepare_converter(config, ui)
    converter_classes.require_text_class(folder, converter, config)
    version = converter_source.describe_converter(config)
    ui.note(
        f"{folder.name} is converted by llama.cpp's own converter ({version}), because {reason}"
    )
    request = ConverterRequest(
        folder,
        "the model",
        converter_source.CONVERT_SCRIPT,
        (str(folder), "--outtype", dtype.lower(), *["--no-mtp"] * no_mtp),
        {CONVERTER_KEY: f"llama.cpp ({converter_source.released_version(config)})"},
    )
    with start_conversion(request, converter, config, ui) as conversion:
        header = read_header.read_header(conversion.header_file)
        load_checks.check_loadable(header)
        source = _open_source(folder, header, conversion.file, files, pre)
        if converter_classes.has_mmproj_class(folder, converter):
            source = replace(source, notes=(*source.notes, MMPROJ_NOTE))
        kind = header.metadata.get("tokenizer.ggml.model")
        source = _verify(source, kind, pre, accept_tokenizer_differences, ui)
        ui.note(
            f"it writes a temporary copy in {source.dtype} first: {describe_cost(conversion)}; "
            "the copy is deleted at the end"
        )
        yield ConvertedCheckpoint(source, conversion, ui)


def _read_weights(folder: Path, *, allow_pickle: bool) -> tuple[tuple[Path, ...], str]:
    """Return the files of a checkpoint's weights, and the type of the copy: that of the first float
    matrix, so that nothing is rounded twice; BF16 for pickled weights and for quantized ones.

    As in open_checkpoint, safetensors take precedence over pickled weights. Raises UserError if
    there are no weights, if they are damaged, or if pickled weights are not allowed.
    """
    blobs = safetensors.find_safetensors(folder)
    if not any(name.startswith("model") for name in blobs) and (
        found := pickles.find_pickles(folder)
    ):
        if not allow_pickle:
            raise pickles.pickles_not_allowed(folder, [file.name for file in found])
        return tuple(file for file in found if file.suffix != ".json"), "BF16"
    tensors = safetensors.load_tensors(CheckpointFolder(folder), blobs).values()
    dtypes = [tensor.dtype for tensor in tensors if len(tensor.shape) > 1]
    is_quantized = not set(dtypes) <= {*safetensors.FLOAT_DTYPES}
    return (
        tuple(sorted({tensor.file for tensor in tensors})),
        "BF16" if is_quantized or not dtypes else dtypes[0],
    )


def _open_source(
    folder: Path, header: "ModelHeader", file: Path, files: tuple[Path, ...], pre: str | None
) -> "Source":
    """Return the checkpoint as a Source, whose weights are read from the finished GGUF `file`.
    `files`: those of the checkpoint. `pre`: the name of the pre-tokenizer that replaces the
    converter's.
    """
    gguf = open_gguf(header.path)
    weights = tuple(
        replace(
            weight,
            read=make_file_row_reader(
                file, tensor.offset, weight.nbytes // weight.rows, weight.name
            ),
        )
        for weight, tensor in zip(gguf.weights, header.tensors, strict=True)
    )
    entries = gguf.entries
    if pre:
        entries = tuple(
            (key, encode_entry("string", pre) if key == "tokenizer.ggml.pre" else value)
            for key, value in entries
        )
    matrices = [weight.type for weight in weights if len(weight.shape) > 1]
    dtype = max(sorted(set(matrices)), key=matrices.count, default="F32")
    return replace(
        gguf,
        path=folder,
        files=files,
        name=general_metadata.find_origin(folder).name,
        entries=entries,
        weights=weights,
        dtype=dtype if dtype in FLOAT_FILE_TYPES else "BF16",
        blobs=tuple(map(LocalFile, files)),
    )


def _verify(
    source: "Source", kind: object, pre: str | None, accept_differences: bool, ui: "UI"
) -> "Source":
    """Return the source with notes about the comparison of its vocabulary with the checkpoint's own
    tokenizer, or with a warning if they cannot be compared. `kind`: that of the vocabulary in
    llama.cpp. Raises UserError if they differ.
    """
    from llmcli.model_loader.verify_tokenizer import verify_tokenizer

    folder = CheckpointFolder(source.path)
    if kind is None or kind in NO_VOCABULARY:
        return source
    if kind in VERIFIED_VOCABULARIES and any(map(folder.has_file, TOKENIZER_FILES)):
        with ui.status(f"compare the vocabulary of {source.name} with its tokenizer …"):
            return verify_tokenizer(source, source.path, pre, accept_differences)
    missing = (
        f"vocabularies of the kind {kind} cannot be compared yet"
        if kind not in VERIFIED_VOCABULARIES
        else f"the checkpoint has neither {' nor '.join(TOKENIZER_FILES)}"
    )
    warning = f"the vocabulary was not compared with the model's own tokenizer: {missing}"
    return replace(source, warnings=(*source.warnings, warning))
