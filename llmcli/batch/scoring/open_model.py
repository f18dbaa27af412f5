"""Opens a model for embeddings or scores of texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from llmcli.model_loader.open_server_model import open_server_model
from llmcli.model_loader.placement_flags import PlacementFlags
from llmcli.model_loader.run_flags import RunFlags

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.open_server_model import ServerModel
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """The options of the model. They have the names and the meaning of those of RunOptions; None
    chooses the value for the machine and the model. `ctx_size`: tokens of the longest text.
    """

    ctx_size: int | None = None
    threads: int | None = None
    gpu_layers: str | None = None
    flash_attn: str | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None

    def run_flags(self, placement: PlacementFlags) -> RunFlags:
        """Return the options as those of a run without answers, whose context has the default
        size.
        """
        from llmcli.runtime.requests.beam_settings import NO_SEARCH
        from llmcli.runtime.requests.request import RunOptions

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        typed = {
            name: value
            for name, value in values.items()
            if value not in (None, 0) and name != "ctx_size"
        }
        return RunFlags(
            RunOptions(**typed),
            {},
            NO_SEARCH,
            frozenset(typed),
            placement=placement,
            raw=True,
            draft="off",
            ngram_draft="off",
        )


@contextmanager
def open_scoring_model(
    ref: str, options: ScoringOptions, placement: PlacementFlags, config: "Config", ui: "UI"
) -> "Iterator[ServerModel]":
    """Open the model `ref`, and close it after the `with` block. Raises UserError.

    The context for answers is not used, so it is small. The embedder opens one for the texts, as
    large as they need it.
    """
    from llmcli.planning.resolve_options import longest_text, validate_options
    from llmcli.runtime.scoring.embedder import MIN_CELLS

    flags, n_tokens = options.run_flags(placement), options.ctx_size or None
    validate_options(replace(flags.options, ctx_size=n_tokens))
    with open_server_model(
        ref, flags, config, ui, parallel=1, max_gap_seconds=None, max_default_ctx=MIN_CELLS
    ) as hosted:
        runner = hosted.runner
        runner.embedding_tokens = longest_text(runner.header, n_tokens, ui.warn)
        yield hosted
