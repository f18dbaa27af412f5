"""The notes about a plan: why tensors get their codes from another method."""

from pathlib import Path

import numpy as np
import pytest

from llmcli.model_loader.plan_notes import print_plan_notes
from llmcli.ui import UI
from quant.calibration.moments import load_moments
from quant.calibration.moments_writer import MomentSums, write_moments
from quant.quantize.plan import plan_quantization
from quant.quantize.write import open_gguf
from tests.quant import tiny_gguf


def test_tensors_without_moments_are_named_and_those_that_gptq_does_not_suit_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=256, ff=256, layers=1, tied=True)
    sums = MomentSums.from_matrices(
        (np.eye(256) + 0.5)[None] * 5000, np.zeros((1, 256)), np.full(1, 5000.0)
    )
    names = [f"blk.0.{role}.weight" for role in ("attn_q", "attn_k", "attn_v", "ffn_gate")]
    moments = load_moments(write_moments(tmp_path / "moments.gguf", [(tuple(names), sums)]))
    plan = plan_quantization(open_gguf(model), "Q4_K_M", method="gptq", moments=moments)
    print_plan_notes(plan, UI(color=False))
    notes = " ".join(capsys.readouterr().err.split())
    assert "because there are no second moments of the input: token_embd.weight" in notes
    # attention mixes the values, and these moments are not of the mixture
    assert "1 tensor quantized by search, because gptq does not suit the role or the type" in notes
