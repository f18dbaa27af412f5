"""The built-in texts: calibration and evaluation share no kind of text and no passage."""

from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.workflows.calibration import texts
from llmcli.workflows.evaluation.text import read_evaluation_text
from quant.calibration.text_overlap import overlap, sample_windows


def test_the_built_in_texts_share_no_kind_and_no_passage() -> None:
    evaluation, calibration = read_evaluation_text(None), texts.describe_texts([])
    assert evaluation.kinds
    assert not set(evaluation.kinds) & set(calibration.kinds)
    share = overlap(sample_windows([evaluation.content]), calibration.windows)
    assert share is not None
    assert share < 0.001


def test_a_text_of_the_user_is_described_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Every sentence here is the user's own, and it is long enough. " * 3)
    record = texts.describe_texts([path])
    assert (record.names, record.kinds) == ((str(path),), ())
    assert overlap(sample_windows([path.read_text()]), record.windows) == 1.0


def test_the_text_of_eval_is_refused_as_a_calibration_text(tmp_path: Path) -> None:
    path = tmp_path / "plays.txt"
    path.write_text(read_evaluation_text(None).content)
    with pytest.raises(UserError, match="the text that eval reads"):
        texts.describe_texts([path])
