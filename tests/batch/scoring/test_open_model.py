"""A model for embeddings has no large context for answers."""

from pathlib import Path

import pytest

from llmcli.batch.scoring.open_model import ScoringOptions, open_scoring_model
from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.model_loader.placement_flags import PlacementFlags
from llmcli.runtime.scoring.embedder import MIN_CELLS
from llmcli.ui import UI


def test_only_the_longest_text_decides_on_the_memory(stories_gguf: Path) -> None:
    options = ScoringOptions(ctx_size=4096, threads=1)
    with open_scoring_model(
        str(stories_gguf), options, PlacementFlags(), load_config(), UI()
    ) as hosted:
        embedder = hosted.runner.embedder()
        assert hosted.runner.n_ctx <= MIN_CELLS and embedder.max_tokens == 4096
        job = embedder.start_job([list(range(3, 500)) * 2])
        while job.step():
            pass
        assert len(job.vectors) == 1 and embedder.n_cells == 1024


def test_the_longest_text_has_the_trained_length_by_default(
    stories_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_scoring_model(
        str(stories_gguf), ScoringOptions(ctx_size=0), PlacementFlags(), load_config(), UI()
    ) as hosted:
        assert hosted.runner.embedder().max_tokens == hosted.runner.header.context_length
    assert "exceeds" not in capsys.readouterr().err
    with open_scoring_model(
        str(stories_gguf), ScoringOptions(ctx_size=4096), PlacementFlags(), load_config(), UI()
    ):
        assert "a context of 4096 exceeds the 512 tokens" in capsys.readouterr().err


def test_a_size_that_no_model_has_is_refused(stories_gguf: Path) -> None:
    options = ScoringOptions(ctx_size=-1)
    with (
        pytest.raises(UserError, match="--ctx-size is -1"),
        open_scoring_model(str(stories_gguf), options, PlacementFlags(), load_config(), UI()),
    ):
        pass
