"""The text for an evaluation, and the checks of a model file before an evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide


DEFAULT_CTX = 512
PROBE_CHUNK_TOKENS = 512  # chunk length of the text on which a mix of tensor types is chosen


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A text to evaluate on. `name`: the path of its file, or a description of the built-in
    text.
    """

    content: str
    name: str


def read_evaluation_text(path: Path | None) -> EvaluationText:
    """Return the text of a file, or the built-in text if `path` is None.

    One line break at the end is removed, as by llama.cpp's -f. Raises UserError.
    """
    from importlib import resources

    from llmcli.errors import UserError
    from llmcli.text_input import decode_utf8

    if path is None:
        raw, name = (
            (resources.files("quant") / "texts" / "evaluation.txt").read_bytes(),
            "the plays that ship",
        )
    else:
        try:
            raw, name = path.expanduser().read_bytes(), str(path)
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", hint="--text takes a text file"
            ) from None
    return EvaluationText(decode_utf8(raw, name).removesuffix("\n"), name)


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
    model_side = EvaluationSide(header, *resolve_options.resolve_options(header, options, ui.warn))
    if not model_side.n_vocab:
        raise UserError(
            f"{path.name} has no vocabulary, so it cannot read text", hint="name another file"
        )
    return model_side
