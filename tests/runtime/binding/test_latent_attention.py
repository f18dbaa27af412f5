"""Quantized models with latent attention run, although llama.cpp aborts when it repacks them for
AMX.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from llmcli.runtime import reproducible
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.quant import families
from tests.quant.families.deepseek2 import v2

# the sizes of DeepSeek's models, whose rows fill the blocks of every quantized type
SIZES = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
RUN = """
import sys
from pathlib import Path
from llmcli.bench.speed.measure import open_model_under_test
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling

for flash in ("on", "off"):
    options = RunOptions(ctx_size=64, threads=1, batch_size=64, flash_attn=flash)
    with open_runner(Path(sys.argv[1]), options) as runner:
        reply = runner.reply(Request((1, 5, 6), default_sampling().with_values({"temp": 0}), max_tokens=3))
        assert len(list(reply)) >= 1
with open_model_under_test(Path(sys.argv[1]), ON_HOST):
    print("ran")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: there is no checkpoint"
    )
    return families.build(v2("real sizes", **SIZES), tmp_path_factory.mktemp("latent") / "model")


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K_M"])
def test_a_quantized_model_with_latent_attention_runs(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """The model runs in a separate process, because an abort would end the test process."""
    out = tmp_path / "out.gguf"
    write.write_model(plan.plan_quantization(checkpoint_source.open_checkpoint(folder), kind), out)
    assert read_header.read_header(out).has_latent_attention
    command, root = [sys.executable, "-c", RUN, str(out)], Path(__file__).parents[3]
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert (process.returncode, process.stdout) == (0, "ran\n"), process.stderr[-2000:]


def test_a_model_without_latent_attention_is_recognized(stories_gguf: Path) -> None:
    assert not read_header.read_header(stories_gguf).has_latent_attention


def test_reproducible_mode_covers_latent_attention_and_experts_that_floats_choose(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "experts.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0"), out
    )
    header = read_header.read_header(out)
    reproducible.check_model(header)
    assert reproducible.computes_single_tokens(header)
    small = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    dense = families.build(
        v2("no experts", **SIZES | small, first_k_dense_replace=2), tmp_path / "dense"
    )
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(dense), "Q8_0"),
        out := tmp_path / "dense.gguf",
    )
    assert read_header.read_header(out).has_latent_attention
    answers = []
    for n_ubatch in (512, 5):
        options = reproducible.with_required_options(
            RunOptions(ctx_size=128, threads=1, ubatch_size=n_ubatch)
        )
        with open_runner(out, options) as runner:
            request = Request(
                tuple(range(3, 60)),
                default_sampling().with_values({"temp": 0}),
                8,
                ignore_eos=True,
                logprobs=True,
            )
            reply = runner.reply(request)
            list(reply)
            answers.append([(token.id, token.logprob) for token in reply.answer.tokens])
    assert answers[0] == answers[1]
