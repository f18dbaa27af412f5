"""The logits of every family equal those of transformers, and every family has a test case."""

from pathlib import Path

import numpy as np
import pytest

from quant.convert import checkpoint_source
from quant.convert.archs import ARCHS
from quant.model_file import load_checks, read_header
from quant.quantize import plan, write
from tests.quant import families


def test_every_family_has_a_case() -> None:
    assert {case.hf for case in families.cases()} >= ARCHS.keys()


@pytest.mark.parametrize("case", families.cases(), ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: families.Case, tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: logits have no oracle"
    )
    folder, out = families.build(case, tmp_path / "model"), tmp_path / "model.gguf"
    write.write_model(plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "F32"), out)
    load_checks.check_loadable(read_header.read_header(out))
    ours = families.ours(out, output=case.output)
    theirs = families.theirs(folder, output=case.output)
    assert families.nmse(ours, theirs) < case.limit
    if case.output == "logits":
        equal_tokens, clear_tokens = families.agreement(ours, theirs)
        assert equal_tokens == clear_tokens > 300
    elif case.output == "vectors":
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        assert ((ours * theirs).sum(axis=1) / lengths).min() > 1 - case.limit
