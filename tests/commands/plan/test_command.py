"""`llmcli plan`: the JSON, the printed table, other types, GPU layers and models on the hub."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli.commands.plan import quantized_sizes
from llmcli.hardware import host
from llmcli.model_loader import header_only
from llmcli.planning import resolve_options
from llmcli.runtime.binding.placement.model_placement import ON_HOST, ModelPlacement
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from tests.fixtures.cli import Done
from tests.fixtures.fake_hub import Hub

Llmcli = Callable[..., Done]

LAYER = {"layer": int, "cells": int, "k_bytes": int, "v_bytes": int}
DEVICE = {
    "name": str,
    "weights_bytes": int,
    "repacked_bytes": int,
    "kv_bytes": int,
    "compute_bytes": int,
    "output_bytes": int,
    "total_bytes": int,
    "available_bytes": int,
    "fits": bool,
    "types": {"F32": int},
}
QUANT = {
    "type": str,
    "file_bytes": int,
    "bits_per_weight": float,
    "total_bytes": int,
    "process_bytes": int,
    "fits": bool,
    "needs_imatrix": bool,
    "present": bool,
    "requantizes": bool,
}
SHAPE = {
    "weights_bytes": int,
    "kv": {"bytes_per_token": int, "cells": int, "bytes": int, "layers": [LAYER]},
    "compute_bytes": int,
    "output_bytes": int,
    "repacked_bytes": int,
    "droppable_bytes": int,
    "overhead_bytes": int,
    "process_bytes": int,
    "total_bytes": int,
    "available_bytes": int,
    "fits": bool,
    "max_ctx": {"f16": int, "q8_0": int, "q4_0": int},
    "devices": [DEVICE],
    "runs": bool,
    "max_parallel": int,
    "draft_bytes": object,
    "outside_bytes": int,
    "reading_bytes": object,
    "scored_bytes": object,
    "checkpoint_bytes": object,
    "max_checkpoint_bytes": int,
    "gpu_layers": {"most": int, "layers": int},
    "placement": {
        "gpu_layers": int,
        "cpu_moe_layers": int,
        "split_mode": str,
        "main_gpu": int,
        "tensor_split": [float],
        "tensor_overrides": [{"pattern": str, "buffer": str}],
        "kv_offload": bool,
        "load_mode": str,
        "devices": [
            {
                "device": str,
                "layers": [int],
                "has_output": bool,
                "layer_bytes": int,
                "expert_bytes": int,
                "override_bytes": int,
                "kv_bytes": int,
                "compute_bytes": int,
            }
        ],
    },
    "quants": [QUANT],
}


@pytest.fixture(autouse=True)
def few_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the file types to seven, because planning all of them takes long."""
    all_types = quantized_sizes.file_types()
    names = ("F32", "Q8_0", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ2_XXS", "MXFP4_MOE")
    monkeypatch.setattr(
        quantized_sizes, "file_types", lambda: {name: all_types[name] for name in names}
    )


def type_errors(shape: Any, value: Any, where: str, unknown: bool = False) -> list[str]:
    """Return one message for each value whose type is not the one that `shape` gives.

    With `unknown`, null is valid for every value.
    """
    if value is None and unknown:
        return []
    if isinstance(shape, dict):
        if not isinstance(value, dict) or set(shape) != set(value):
            return [f"{where}: {value!r} instead of {sorted(shape)}"]
        return [
            error
            for key in shape
            for error in type_errors(shape[key], value[key], f"{where}.{key}", unknown)
        ]
    if isinstance(shape, list):
        return [
            error
            for element in value
            for error in type_errors(shape[0], element, f"{where}[]", unknown)
        ]
    return (
        []
        if isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
        else [f"{where}: {value}"]
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.quant import tiny_gguf

    return tiny_gguf.llama(tmp_path_factory.mktemp("plan") / "tiny.gguf", layers=3)


def test_the_json_has_the_documented_keys_and_agrees_with_the_measurement(
    llmcli: Llmcli, model: Path
) -> None:
    done = llmcli("plan", str(model), "-c", "1000", "--json", "--measure")
    planned = json.loads(done.out)
    measured = planned.pop("actual")
    planned["gpu_layers"]["most"] = planned["gpu_layers"]["most"] or 0  # null without a GPU
    assert (
        type_errors(SHAPE, planned, "") + type_errors(SHAPE, measured, "actual", unknown=True) == []
    )
    for key in ("weights_bytes", "repacked_bytes", "compute_bytes", "output_bytes", "total_bytes"):
        assert planned[key] == measured[key], key
    assert planned["kv"]["bytes"] == measured["kv"]["bytes"]
    assert planned["kv"]["cells"] == 1024
    assert (
        sum(planned["devices"][0]["types"].values()) == read_header.read_header(model).tensor_bytes
    )
    assert (
        sum(row["k_bytes"] + row["v_bytes"] for row in planned["kv"]["layers"])
        == planned["kv"]["bytes"]
    )
    keys = ("weights_bytes", "repacked_bytes", "compute_bytes", "output_bytes")
    assert planned["total_bytes"] == planned["kv"]["bytes"] + sum(planned[key] for key in keys)
    assert planned["process_bytes"] == planned["total_bytes"] + planned["overhead_bytes"]


def test_the_printed_plan_is_a_table_with_notes(llmcli: Llmcli, model: Path) -> None:
    done = llmcli(
        "plan", str(model), "-c", "512", "-np", "2", "-ctk", "q8_0", "-ctv", "q8_0", "--measure"
    )
    assert done.code == 0
    assert "512 tokens of context for 2 sequences, one pool" in done.out
    for text in ("KV cache", "difference", "it fits", "0-2", "q4_0"):
        assert text in done.out
    assert "the 64 tokens this model was trained on" in done.err
    assert re.search("serve and batch use up to .*B more of the free memory", done.out)
    plain = llmcli("plan", str(model)).out
    assert "whole process" in plain and "serve and batch" not in plain


def test_without_a_unified_cache_each_sequence_is_rounded_up_to_256_cells(
    llmcli: Llmcli, model: Path
) -> None:
    words = ("plan", str(model), "-c", "600", "-np", "3", "--json")
    unified = json.loads(llmcli(*words).out)
    assert unified["kv"]["cells"] == 768
    free = unified["available_bytes"] - unified["total_bytes"]
    assert unified["outside_bytes"] == (free + (unified["droppable_bytes"] or 0)) // 2
    separate = json.loads(llmcli(*words, "--no-kv-unified").out)
    assert (separate["kv"]["cells"], separate["reading_bytes"]) == (3 * 256, 0)


def test_one_slot_of_a_recurrent_model_plans_its_checkpoints(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.quant import tiny_gguf

    words = ("plan", str(tiny_gguf.mamba(tmp_path / "mamba.gguf")), "-c", "512")
    document = json.loads(llmcli(*words, "--json").out)
    size, free = document["checkpoint_bytes"], document["available_bytes"]
    free += (document["droppable_bytes"] or 0) - document["total_bytes"]
    assert size > 2 * 4 * 64 * 16  # the states of two layers
    assert document["outside_bytes"] == free // 2
    assert document["max_checkpoint_bytes"] == 32 * size
    out = llmcli(*words).out
    assert re.search(f"checkpoints in addition, at most +{32 * size:,} ", out)
    report = tmp_path / "plan.html"
    assert llmcli(*words, "--report", str(report)).code == 0
    row = rf"checkpoints in addition, at most</t[hd]>\s*<td[^>]*>{32 * size:,}<"
    assert re.search(row, report.read_text())
    assert "a checkpoint, to which a conversation can go back, takes about " in out
    assert "each conversation keeps up to 32, and all together at most " in out
    assert "serve and batch use" not in out
    several = json.loads(llmcli(*words, "-np", "2", "--json").out)
    assert several["max_checkpoint_bytes"] == 64 * size
    # half of the free memory is for states, and half of that for checkpoints
    monkeypatch.setattr(
        host, "available_memory", lambda: document["available_bytes"] - free + 4 * 3 * size + 8
    )
    little = json.loads(llmcli(*words, "--json").out)
    assert (little["outside_bytes"], little["max_checkpoint_bytes"]) == (6 * size + 4, 3 * size)


def test_a_model_without_checkpoints_keeps_nothing_outside_with_one_slot(
    llmcli: Llmcli, model: Path
) -> None:
    document = json.loads(llmcli("plan", str(model), "-c", "512", "--json").out)
    keys = ("checkpoint_bytes", "max_checkpoint_bytes", "outside_bytes")
    assert [document[key] for key in keys] == [0, 0, 0]
    assert "checkpoint" not in llmcli("plan", str(model), "-c", "512").out


def test_checkpoints_of_unknown_size_are_planned_with_their_share_of_the_memory(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.planning.prediction import cache_layout
    from tests.quant import tiny_gguf

    monkeypatch.setattr(cache_layout, "checkpoint_bytes", lambda header, options: None)
    words = ("plan", str(tiny_gguf.mamba(tmp_path / "mamba.gguf")), "-c", "512")
    document = json.loads(llmcli(*words, "--json").out)
    assert document["checkpoint_bytes"] is None
    assert document["max_checkpoint_bytes"] == document["outside_bytes"] // 2 > 0
    assert "takes an unknown number of bytes of host memory" in llmcli(*words).out


def test_the_bytes_of_the_prefill_context_are_exact(llmcli: Llmcli, model: Path) -> None:
    words = ("plan", str(model), "-c", "512", "-t", "1", "--json")
    planned_bytes = json.loads(llmcli(*words, "-np", "3").out)["reading_bytes"]
    options = RunOptions(ctx_size=512, threads=1, flash_attn="off", prefill_cells=512)
    with open_runner(model, options, slots=3) as runner:
        assert planned_bytes == runner.prefill_bytes
    for sequences in ("1", "9"):
        assert json.loads(llmcli(*words, "-np", sequences).out)["reading_bytes"] == 0


def test_the_bytes_of_scoring_outputs_match_the_allocation(llmcli: Llmcli, model: Path) -> None:
    words = ("plan", str(model), "-c", "512", "-t", "1", "--json")
    planned_bytes, allocated_bytes = (
        json.loads(llmcli(*words, "-np", "3", "-fa", "on").out)["scored_bytes"],
        [],
    )
    rows = resolve_options.scoring_outputs(read_header.read_header(model))
    for scored in (0, rows):
        options = RunOptions(ctx_size=512, threads=1, flash_attn="on", scoring_outputs=scored)
        with open_runner(model, options, slots=3) as runner:
            request, vocabulary = (
                Request((5,) * 150, default_sampling(), 1, score_prompt=bool(scored)),
                runner.model.n_vocab,
            )
            for _ in range(3):
                runner.engine.submit(request)
            while runner.engine.is_busy:
                runner.engine.step()
            breakdown = runner.context.memory_breakdown()
            assert breakdown
            allocated_bytes.append(
                sum(buffer.compute_bytes for buffer in breakdown.buffers)
                + runner.context.output_bytes
            )
    assert planned_bytes >= 4 * rows * vocabulary > 0
    assert (
        0 <= planned_bytes - (allocated_bytes[1] - allocated_bytes[0]) <= 4 * 3 * vocabulary
    )  # each of the three sequences may have one more row of logits
    document = json.loads(llmcli(*words, "-np", "3").out)  # with a prefill context
    assert document["reading_bytes"] and document["scored_bytes"] > 2 * 4 * (rows - 1) * vocabulary
    assert json.loads(llmcli(*words).out)["scored_bytes"] == 0


def test_a_plan_that_does_not_fit_names_options_that_do(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 24 << 20)
    done = llmcli("plan", str(model), "-c", "65536")
    assert done.code == 0
    assert "it does not fit" in done.out
    assert "would fit: -c " in done.out
    assert "-ctk q8_0 -ctv q8_0" in done.out
    document = json.loads(llmcli("plan", str(model), "-c", "65536", "-np", "2", "--json").out)
    assert (document["fits"], document["outside_bytes"]) == (False, 0)
    assert (
        json.loads(llmcli("plan", str(model), "-c", str(document["max_ctx"]["f16"]), "--json").out)[
            "fits"
        ]
        is True
    )
    refused = llmcli("plan", str(model), "-c", "65536", "--measure")
    assert (refused.code, refused.out) == (1, "")
    assert "does not fit and was not loaded" in refused.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-ctk", "q9"], "unknown KV cache type"),
        (["-c", "-5"], "--ctx-size is -5"),
        (["-fa", "perhaps"], "-fa takes"),
        (["-ctv", "q8_0", "-fa", "off"], "needs flash attention"),
        (["--quant", "Q9"], "Q9"),
        (["-np", "999"], "256"),
        (["-ngl", "many"], "--gpu-layers"),
    ],
)
def test_invalid_arguments_are_an_error_without_output(
    llmcli: Llmcli, model: Path, words: list[str], message: str
) -> None:
    done = llmcli("plan", str(model), *words)
    assert (done.code, done.out) == (1, "")
    assert message in done.err
    assert "Traceback" not in done.err


def test_the_row_of_every_type_equals_the_file_that_quantize_makes(
    llmcli: Llmcli, stories: Path, tmp_path: Path
) -> None:
    """The planned sizes and totals equal those of files that are really made."""
    from tests.quant import tiny_gguf

    f32_file = tiny_gguf.llama(tmp_path / "whole.gguf", layers=3)
    words = ("-c", "512", "--json")
    document = json.loads(llmcli("plan", str(f32_file), *words).out)
    rows = {row["type"]: row for row in document["quants"]}
    assert rows["F32"]["present"]
    assert rows["F32"]["file_bytes"] == f32_file.stat().st_size
    assert rows["F32"]["total_bytes"] == document["total_bytes"]
    assert not any(row["requantizes"] for row in document["quants"])
    sizes = [row["file_bytes"] for row in document["quants"]]
    assert sizes == sorted(sizes, reverse=True)
    assert rows["IQ2_XXS"]["needs_imatrix"]
    assert "MXFP4_MOE" not in rows  # the model has no experts
    for name in ("Q8_0", "Q4_K_M", "Q4_0"):
        quantized_file = tmp_path / f"{name}.gguf"
        plan = plan_quantization(write.open_gguf(f32_file), name)
        write.write_model(plan, quantized_file, threads=1)
        quantized = json.loads(llmcli("plan", str(quantized_file), *words).out)
        assert rows[name]["file_bytes"] == quantized_file.stat().st_size
        assert rows[name]["bits_per_weight"] == pytest.approx(plan.bits_per_weight, abs=1e-4)
        assert rows[name]["total_bytes"] == quantized["total_bytes"]
        quantized_rows = {row["type"]: row for row in quantized["quants"]}
        assert quantized_rows[name]["present"] and not quantized_rows[name]["requantizes"]
        assert quantized_rows["Q5_K_M"]["requantizes"]
        assert quantized_rows["Q5_K_M"]["total_bytes"] == rows["Q5_K_M"]["total_bytes"]
    out = llmcli("plan", str(tmp_path / "Q4_0.gguf"), "-c", "512").out
    assert "adds its error to that" in out
    assert "adds its error to that" not in llmcli("plan", str(f32_file), "-c", "512").out


def test_max_parallel_is_exact_and_weights_may_stay_on_the_disk(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 64 << 20
    monkeypatch.setattr(host, "available_memory", lambda: free)
    words = ("plan", str(model), "-c", "4096", "--json")
    document = json.loads(llmcli(*words).out)
    max_parallel = document["max_parallel"]
    assert 1 < max_parallel < 256
    documents = [
        json.loads(llmcli(*words, "-np", str(n), "-c", str(4096 * n)).out)
        for n in (max_parallel, max_parallel + 1)
    ]
    assert [planned["fits"] for planned in documents] == [True, False]
    assert "sequences of 4,096 tokens that fit at once: " in llmcli(*words[:-1]).out
    free = document["total_bytes"] - 1
    document = json.loads(llmcli(*words).out)
    assert (document["fits"], document["runs"], document["max_parallel"]) == (False, True, 0)
    out = llmcli(*words[:-1]).out
    assert "at the speed of the disk" in out
    assert "would fit: -c 3" in out
    assert "--quant " in out


def test_a_draft_model_adds_to_every_figure(llmcli: Llmcli, model: Path, tmp_path: Path) -> None:
    from tests.quant import tiny_gguf

    draft_file = tiny_gguf.llama(tmp_path / "small.gguf", layers=1)
    words = ("plan", str(model), "-c", "512", "--json")
    target, both = (
        json.loads(llmcli(*words, *flags).out) for flags in ((), ("-md", str(draft_file)))
    )
    assert target["draft_bytes"] is None
    keys = ("weights_bytes", "compute_bytes", "repacked_bytes", "output_bytes")
    assert both["total_bytes"] == both["kv"]["bytes"] + sum(both[key] for key in keys)
    draft = json.loads(
        llmcli("plan", str(draft_file), "-c", "512", "-b", "256", "-ub", "256", "--json").out
    )
    assert both["weights_bytes"] == target["weights_bytes"] + draft["weights_bytes"]
    assert both["kv"]["bytes"] == target["kv"]["bytes"] + draft["kv"]["bytes"]
    assert both["draft_bytes"] >= draft["total_bytes"]  # drafting needs several rows of logits
    assert both["max_ctx"]["f16"] <= target["max_ctx"]["f16"]
    totals = [
        {row["type"]: row["total_bytes"] for row in document["quants"]}
        for document in (target, both)
    ]
    assert all(totals[1][name] > totals[0][name] + draft["weights_bytes"] for name in totals[0])
    assert "the draft model takes " in llmcli(*words[:-1], "-md", str(draft_file)).out
    refused = llmcli(*words[:-1], "-md", str(draft_file), "--measure")
    assert (refused.code, refused.out) == (2, "")
    other_vocabulary = tiny_gguf.llama(tmp_path / "other.gguf", layers=1, vocab=700)
    assert llmcli(*words[:-1], "-md", str(other_vocabulary)).code == 1


def test_the_weights_of_draft_heads_are_in_every_total(
    llmcli: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.runtime.drafting.draft_files.heads_file import MEDUSA, HeadShapes
    from tests.fixtures.draft_heads import write_heads
    from tests.quant import tiny_gguf

    model = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, ff=64, layers=2, tied=True)
    weights = write_heads(tmp_path / "h.gguf", HeadShapes(MEDUSA, 64, 300, 4, 2, 0, False), model)
    nbytes = sum(values.nbytes for values in weights.values())
    words = ("plan", str(model), "-c", "512", "-fa", "on")
    # the method needs several rows of logits, with heads and with guesses of the text alike
    plain = json.loads(llmcli(*words, "--ngram-draft", "on", "--json").out)
    both = json.loads(llmcli(*words, "-md", str(tmp_path / "h.gguf"), "--json").out)
    assert (plain["draft_bytes"], both["draft_bytes"]) == (None, nbytes)
    assert both["weights_bytes"] == plain["weights_bytes"] + nbytes
    keys = ("weights_bytes", "compute_bytes", "repacked_bytes", "output_bytes")
    assert both["total_bytes"] == both["kv"]["bytes"] + sum(both[key] for key in keys)
    assert all(
        row["total_bytes"] == other["total_bytes"] + both["total_bytes"] - plain["total_bytes"]
        for row, other in zip(both["quants"], plain["quants"], strict=True)
    )
    done = llmcli(*words, "-md", str(tmp_path / "h.gguf"))
    assert "the draft heads take " in done.out
    free = both["total_bytes"] - (both["droppable_bytes"] or 0) - 1
    monkeypatch.setattr(host, "available_memory", lambda: free)
    assert (
        json.loads(llmcli(*words, "-md", str(tmp_path / "h.gguf"), "--json").out)["fits"] is False
    )
    monkeypatch.setattr(host, "available_memory", lambda: free + 1)
    assert json.loads(llmcli(*words, "-md", str(tmp_path / "h.gguf"), "--json").out)["fits"] is True


def test_the_memory_of_prediction_layers_is_planned_and_measured(
    llmcli: Llmcli, tmp_path: Path
) -> None:
    from tests.quant import predicting_checkpoint

    model = predicting_checkpoint.write_gguf(tmp_path / "m.gguf")
    words = ("plan", str(model), "-c", "512", "-t", "1", "--json")
    automatic, mtp, off = (
        json.loads(llmcli(*words, "--measure", *flags).out)
        for flags in ((), ("--draft", "MTP"), ("--draft", "off"))
    )
    for document in (mtp, off):
        actual = document["actual"]
        for key in ("weights_bytes", "compute_bytes", "output_bytes"):
            assert actual[key] == document[key], key
        assert actual["kv"]["bytes"] == document["kv"]["bytes"]
    assert mtp["actual"]["total_bytes"] > off["actual"]["total_bytes"]
    # with an f16 cache the prediction layers are used only if they are named
    assert off["total_bytes"] == automatic["total_bytes"] < mtp["total_bytes"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--draft", "magic"), 1, "draft is 'magic'"),
        (("--ngram-draft", "maybe"), 1, "ngram_draft is 'maybe'"),
        (("--draft", "mtp"), 1, "no layers that predict"),
        (("--draft", "model"), 2, "--draft model needs a draft model"),
        (("--draft", "eagle3"), 2, "--draft eagle3 needs an EAGLE-3 draft"),
        (("--draft", "medusa"), 2, "--draft medusa needs draft heads"),
        (("--draft", "mtp", "-md", "x.gguf"), 2, "--draft mtp does not use --model-draft"),
        (("-md", "x.gguf", "--measure"), 2, "--measure does not support a draft file"),
    ],
)
def test_drafts_that_run_refuses_are_refused(
    words: tuple[str, ...], code: int, message: str, llmcli: Llmcli, model: Path
) -> None:
    done = llmcli("plan", str(model), *words)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_drafts_that_compare_rows_need_their_logits(llmcli: Llmcli, model: Path) -> None:
    words = ("plan", str(model), "-c", "512", "--json")
    default, off, pool, ngram = (
        json.loads(llmcli(*words, *flags).out)["output_bytes"]
        for flags in ((), ("--draft", "off"), ("--draft", "pool"), ("--ngram-draft", "on"))
    )
    assert off == default < pool == ngram


def test_the_largest_number_of_gpu_layers_is_found(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices and the planner are fakes: a GPU on which each layer takes 100 bytes."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    from llmcli.planning.dry_runs import memory_plan
    from llmcli.runtime.binding.placement.devices import Device

    header, options = read_header.read_header(model), memory_plan.ContextOptions(512)
    monkeypatch.setattr(
        memory_plan.devices, "list_devices", lambda: [Device("CPU", "", "cpu", 1, 1)]
    )
    assert memory_plan.largest_gpu_layers(header, options, ON_HOST) is None

    @contextmanager
    def open_memory_planner(
        header: Any, options: Any, placement: ModelPlacement, draft: Any
    ) -> Iterator[Any]:
        nbytes = 100 * placement.gpu_layers
        gpu_memory = memory_plan.DeviceMemory("GPU0", nbytes, 0, 10, 5, 0, 0, free)
        yield SimpleNamespace(
            device_memory=lambda options: (
                memory_plan.DeviceMemory("CPU", 1, 0, 0, 0, 0, 0, None),
                gpu_memory,
            )
        )

    monkeypatch.setattr(
        memory_plan.devices, "list_devices", lambda: [Device("GPU0", "", "gpu", 1, 1)]
    )
    monkeypatch.setattr(memory_plan, "open_memory_planner", open_memory_planner)
    for free, expected in (  # noqa: B007, open_memory_planner() reads it
        (14, 0),
        (15, 0),
        (115, 1),
        (314, 2),
        (415, 4),
        (10**6, 4),
    ):
        assert memory_plan.largest_gpu_layers(header, options, ON_HOST) == expected


def test_a_model_is_planned_in_the_type_of_quant(
    llmcli: Llmcli, stories: Path, tmp_path: Path
) -> None:
    """Plans with --quant from a GGUF and from a checkpoint equal the plan of the quantized file."""
    f32_file, quantized_file = tmp_path / "whole.gguf", tmp_path / "q4_0.gguf"
    checkpoint = checkpoint_source.open_checkpoint(stories)
    write.write_model(plan_quantization(checkpoint, "F32"), f32_file, threads=1)
    write.write_model(
        plan_quantization(write.open_gguf(f32_file), "Q4_0"), quantized_file, threads=1
    )
    plans = [
        stable_fields(llmcli("plan", *words, "--json"))
        for words in (
            [str(f32_file), "--quant", "q4_0"],
            [str(stories), "--quant", "q4_0"],
            [str(quantized_file)],
        )
    ]
    assert plans[0] == plans[1] == plans[2]
    refused = llmcli("plan", str(f32_file), "--quant", "q4_0", "--measure")
    assert refused.code == 1
    assert "not quantized to Q4_0 yet" in refused.err


def test_a_file_that_is_no_model_is_refused(llmcli: Llmcli, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    done = llmcli("plan", str(tmp_path / "bad.gguf"))
    assert done.code == 1
    assert done.err.startswith("error: ")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local server in place of the Hugging Face hub."""
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def stable_fields(done: Done) -> dict[str, Any]:
    """Return a plan's JSON without the figures that depend on the process or on the file's
    metadata.
    """
    assert done.code == 0, done.err
    dropped = (
        "process_bytes",
        "overhead_bytes",
        "available_bytes",
        "max_ctx",
        "max_parallel",
        "devices",
    )
    document = {key: value for key, value in json.loads(done.out).items() if key not in dropped}
    # file_bytes depends on the metadata, which names the source of the file.
    dropped_of_row = ("process_bytes", "file_bytes", "requantizes", "present")
    document["quants"] = [
        {key: row[key] for key in row if key not in dropped_of_row} for row in document["quants"]
    ]
    return document


def test_a_gguf_on_the_hub_is_planned_from_its_header(
    llmcli: Llmcli, hub: Hub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is longer than the first range that is read. Only the header is downloaded, and no
    file is saved.
    """
    from llmcli.catalog.hub.content_check import BLOCK_BYTES
    from tests.quant import tiny_gguf

    monkeypatch.setattr(header_only, "FIRST_HEADER_BYTES", 2048)
    file = tiny_gguf.llama(tmp_path / "big-Q8_0.gguf", hidden=512, ff=1024, layers=6, vocab=800)
    hub.add("org/big", {"big-Q8_0.gguf": file.read_bytes()})
    done = llmcli("plan", "org/big:Q8_0", "--json")
    assert stable_fields(done) == stable_fields(llmcli("plan", str(file), "--json"))
    (first_range, *next_ranges) = [str(byte_range) for byte_range in hub.gets("big-Q8_0.gguf")]
    assert first_range == f"bytes=0-{BLOCK_BYTES - 1}"
    assert next_ranges
    last_byte = max(
        int(byte_range.rpartition("-")[2]) for byte_range in (first_range, *next_ranges)
    )
    assert last_byte < file.stat().st_size // 10
    assert not list(home.rglob("*.gguf"))
    refused = llmcli("plan", "org/big:Q8_0", "--measure")
    assert refused.code == 1
    assert "on the hub" in refused.err


def test_the_shards_of_a_gguf_on_the_hub_are_planned_together(
    llmcli: Llmcli, hub: Hub, model: Path, tmp_path: Path
) -> None:
    plan = plan_quantization(write.open_gguf(model), "Q8_0", max_shard_bytes=300_000)
    write.write_model(plan, tmp_path / "cut-Q8_0.gguf", threads=1)
    files = {file.name: file.read_bytes() for file in tmp_path.glob("cut-*.gguf")}
    assert len(files) > 1
    hub.add("org/cut", files)
    first = sorted(tmp_path.glob("cut-*.gguf"))[0]
    assert stable_fields(llmcli("plan", "org/cut:Q8_0", "--json")) == stable_fields(
        llmcli("plan", str(first), "--json")
    )


def test_a_checkpoint_on_the_hub_is_planned_in_the_type_of_quant(
    llmcli: Llmcli, hub: Hub, stories: Path
) -> None:
    hub.add("org/stories", stories)
    words = ("--quant", "q4_0", "--json")
    assert stable_fields(llmcli("plan", "org/stories", *words)) == stable_fields(
        llmcli("plan", str(stories), *words)
    )
    assert "on the hub" in llmcli("plan", "org/stories:Q8_0").out


def test_files_that_cannot_be_planned_on_the_hub_are_an_error(
    llmcli: Llmcli, hub: Hub, model: Path
) -> None:
    hub.add(
        "org/tiny", {"tiny-Q8_0.gguf": model.read_bytes(), "bad-Q4_0.gguf": b"GGUF" + bytes(5000)}
    )
    hub.ignore_range = True
    for words, message in (
        (["org/tiny:Q8_0"], "does not send parts"),
        (["org/tiny:Q8_0", "--offline"], "llmcli runs offline"),
        (["org/tiny:Q2_K"], "has no Q2_K"),
        (["smollm2:135m"], "only the hub serves parts"),
        (["org/none"], "org/none"),
    ):
        done = llmcli("plan", *words)
        assert (done.code, done.out) == (1, "")
        assert message in done.err
    hub.ignore_range = False
    assert "not a valid GGUF" in llmcli("plan", "org/tiny:Q4_0").err
