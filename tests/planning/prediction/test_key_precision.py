"""Keys with a few large values are not stored in few bits, by what a user sees and by what is lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning import admission
from llmcli.planning.dry_runs import nearest_fit
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.prediction.key_precision import describe_key_loss, tolerates_few_bits
from llmcli.runtime.binding.placement.model_placement import ON_HOST, ModelPlacement
from llmcli.runtime.draft_settings import NO_DRAFTING
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.read_header import read_header
from tests.quant import tiny_gguf

BIAS = "blk.1.attn_k.bias"
WIDTH = 128  # two heads of 64


def write_model(path: Path, bias: dict[int, float], fill: float = 0.5) -> Path:
    """Write a random Llama whose second layer adds a bias to keys: `fill`, and other values at some
    places.
    """
    tiny_gguf.llama(path, layers=2, extra={BIAS: (WIDTH,)}, context=4096)
    (tensor,) = (tensor for tensor in read_header(path).tensors if tensor.name == BIAS)
    values = np.full(WIDTH, fill, np.float32)
    values[list(bias)] = list(bias.values())
    with path.open("r+b") as stream:
        stream.seek(tensor.offset)
        stream.write(values.tobytes())
    return path


@pytest.mark.parametrize(
    ("bias", "fill", "tolerates"),
    [
        ({}, 0.5, True),
        ({7: -354.0}, 0.5, False),
        ({7: 9.0}, 0.1, True),  # large beside the others, but small beside keys
        ({}, 50.0, True),  # all the same
        ({7: float("nan")}, 0.5, True),
    ],
)
def test_single_large_values_are_found(
    bias: dict[int, float], fill: float, tolerates: bool, tmp_path: Path
) -> None:
    header = read_header(write_model(tmp_path / "a.gguf", bias, fill))
    assert tolerates_few_bits(header) == tolerates
    assert bool(describe_key_loss(header, "q4_0")) == (not tolerates)
    assert ("expect worse answers" in describe_key_loss(header, "q5_0")) == (not tolerates)
    assert not describe_key_loss(header, "q8_0")
    assert not describe_key_loss(header, "f16")


def test_a_file_that_is_cut_off_is_not_judged(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", {7: 354.0})
    header = read_header(path)
    (tensor,) = (tensor for tensor in header.tensors if tensor.name == BIAS)
    with path.open("r+b") as stream:
        stream.truncate(tensor.offset + 4)
    assert tolerates_few_bits(header)


def test_run_and_plan_warn_of_the_loss(llmcli: Any, tmp_path: Path) -> None:
    lossy = write_model(tmp_path / "lossy.gguf", {7: 354.0})
    plain = write_model(tmp_path / "plain.gguf", {})
    for model, words, warned in (
        (lossy, ("-ctk", "q4_0"), True),
        (lossy, ("-ctk", "q5_0"), False),
        (lossy, ("-ctk", "q8_0", "-ctv", "q4_0"), False),
        (plain, ("-ctk", "q4_0"), False),
    ):
        flags = ("-n", "2", "-t", "1", "-ngl", "0", "-c", "256")
        done = llmcli("run", str(model), "--raw", "ab", *flags, *words)
        assert (done.code, "q4_0 loses the others" in done.err) == (0, warned), done.err
    done = llmcli("plan", str(lossy), "-c", "256")
    assert "q4_0 loses the others" in done.err
    done = llmcli("plan", str(lossy), "-c", "256", "--quant", "q4_k_m")  # a file without weights
    assert done.code == 0, done.err


def test_a_cache_of_four_bits_loses_such_keys(llmcli: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join("abcdefgh"[i * 7 % 8] + "xyz"[i % 3] for i in range(900)))
    divergences = []
    for bias in ({7: 354.0}, {}):
        model = str(write_model(tmp_path / "model.gguf", bias))
        flags = ("-f", str(text), "--ctx", "128", "--chunks", "1", "-t", "1", "-ctk", "q4_0")
        done = llmcli("eval", model, "--base", model, *flags, "--json")
        assert done.code == 0, done.err
        divergences.append(json.loads(done.out)["kl_divergence"]["value"])
    assert divergences[0] > 3 * divergences[1] > 0  # measured: 0.278 and 0.055


@pytest.mark.parametrize(
    ("bias", "types"), [({7: 354.0}, ("q8_0", "q4_0")), ({}, ("q4_0", "q4_0"))]
)
def test_the_nearest_plan_keeps_the_keys(
    bias: dict[int, float],
    types: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is too small for a useful context with any larger cache."""
    header = read_header(write_model(tmp_path / "a.gguf", bias))
    options = RunOptions(65536, 1, 1, batch_size=512, ubatch_size=64, gpu_layers="0")
    plan = RunPlan("tiny", header, options, ON_HOST, NO_DRAFTING, is_ctx_requested=True)
    monkeypatch.setattr(nearest_fit, "GROWTH_BYTES", 0)
    useful = plan.with_changes(
        ctx_size=nearest_fit.MIN_USEFUL_TOKENS, cache_type_k=types[0], cache_type_v=types[1]
    )
    with nearest_fit.open_nearest_fit(useful) as dry_run:
        needed = sum(share.required or 0 for share in dry_run.device_memory(useful))
    monkeypatch.setattr(host, "available_memory", lambda: needed)
    notes: list[str] = []
    accepted = admission.check_memory(plan, "on", notes.append)
    assert (accepted.options.cache_type_k, accepted.options.cache_type_v) == types
    words = "q8_0 and q4_0" if bias else "q4_0"
    assert f"a {words} KV cache instead of f16" in notes[0]
    with pytest.raises(UserError) as refused:
        admission.check_memory(plan, "", notes.append)
    assert f"-ctk {types[0]} -ctv {types[1]} would fit" in refused.value.hint


@pytest.mark.parametrize(
    ("bias", "pairs"),
    [
        ({7: 354.0}, [("f16", "f16"), ("q8_0", "q8_0")]),
        ({}, [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")]),
    ],
)
def test_a_gpu_gets_one_type_for_keys_and_values(
    bias: dict[int, float], pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    header = read_header(write_model(tmp_path / "a.gguf", bias))
    options = RunOptions(4096, 1, 1, batch_size=512, ubatch_size=64)
    plan = RunPlan("tiny", header, options, ModelPlacement(-1), NO_DRAFTING)
    assert list(nearest_fit._cache_type_pairs(plan)) == pairs
