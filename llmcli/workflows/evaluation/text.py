"""The text for an evaluation, and the checks of a model file before an evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide


DEFAULT_CTX = 512
BUILTIN_NAME = "the plays that ship"
BUILTIN_KINDS = ("plays",)  # not among those of the built-in calibration text
MAX_TEXT_BYTES = 1 << 26  # the token ids of a longer text would need more than 2 GB
PROBE_CHUNK_TOKENS = 512  # chunk length of the text on which a mix of tensor types is chosen


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A text to evaluate on. `name`: the path of its file, or a description of the built-in
    text. `kinds`: the kinds of text, such as "plays"; empty if unknown.
    """

    content: str
    name: str
    kinds: tuple[str, ...] = ()


def read_evaluation_text(path: Path | None) -> EvaluationText:
    """Return the text of a file, or the built-in text if `path` is None.

    One line break at the end is removed, as by llama.cpp's -f. Windows line ends are kept, so that
    perplexities are comparable with llama.cpp's. Raises UserError.
    """
    from importlib import resources

    from llmcli import text_input

    if path is None:
        content = (resources.files("quant") / "texts" / "evaluation.txt").read_bytes().decode()
        return EvaluationText(content.removesuffix("\n"), BUILTIN_NAME, BUILTIN_KINDS)
    content = text_input.read_text(
        path,
        max_bytes=MAX_TEXT_BYTES,
        keep_line_ends=True,
        hint="--text takes a text file",
        size_hint=f"use its beginning: head -c {MAX_TEXT_BYTES >> 20}M FILE > part.txt",
    )
    return EvaluationText(content.removesuffix("\n"), str(path))


def prepare_side(path: Path, options: "RunOptions", ui: "UI") -> "EvaluationSide":
    """Check a model file, resolve its run options, and return both. Call it at the start, so that
    an error is reported before any slow step. Raises UserError.
    """
    from llmcli.errors import UserError
    from llmcli.planning import resolve_options
    from llmcli.runtime import kv_size
    from llmcli.workflows.evaluation.models import EvaluationSide
    from quant.model_file import load_checks, read_header

    header = read_header.read_header(path)
    load_checks.check_loadable(header)
    kv_size.check_cache(header.metadata, options.cache_type_k, options.cache_type_v)
    resolved = resolve_options.resolve_options(header, options, ui.warn, note=ui.note)
    model_side = EvaluationSide(header, *resolved)
    if not model_side.n_vocab:
        raise UserError(
            f"{path.name} has no vocabulary, so it cannot read text", hint="name another file"
        )
    return model_side
