import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli.commands.plan import quantized_sizes
from llmcli.hardware import host
from llmcli.model_loader import header_only
from llmcli.planning import resolve_options
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan as plan_module
from quant.quantize import write
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
    "gpu_layers": {"most": int, "layers": int},
    "quants": [QUANT],
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the list of types: rehearsing all of it takes its time."""
    whole = quantized_sizes.file_types()
    names = ("F32", "Q8_0", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ2_XXS", "MXFP4_MOE")
    monkeypatch.setattr(
        quantized_sizes, "file_types", lambda: {name: whole[name] for name in names}
    )


def wrong(shape: Any, value: Any, where: str, unknown: bool = False) -> list[str]:
    """Every place where a document is not as the contract says; `unknown` lets null stand for any
    figure.
    """
    if value is None and unknown:
        return []
    if isinstance(shape, dict):
        if not isinstance(value, dict) or set(shape) != set(value):
            return [f"{where}: {value!r} instead of {sorted(shape)}"]
        return [
            problem
            for key in shape
            for problem in wrong(shape[key], value[key], f"{where}.{key}", unknown)
        ]
    if isinstance(shape, list):
        return [problem for one in value for problem in wrong(shape[0], one, f"{where}[]", unknown)]
    return (
        []
        if isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
        else [f"{where}: {value}"]
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.quant import tiny_gguf

    return tiny_gguf.llama(tmp_path_factory.mktemp("plan") / "tiny.gguf", layers=3)


def test_the_document_is_the_contract_s(llmcli: Llmcli, model: Path) -> None:
    done = llmcli("plan", str(model), "-c", "1000", "--json", "--measure")
    told = json.loads(done.out)
    found = told.pop("actual")
    told["gpu_layers"]["most"] = told["gpu_layers"]["most"] or 0  # null: no GPU here
    assert wrong(SHAPE, told, "") + wrong(SHAPE, found, "actual", unknown=True) == []
    for part in ("weights_bytes", "repacked_bytes", "compute_bytes", "output_bytes", "total_bytes"):
        assert told[part] == found[part], part
    assert told["kv"]["bytes"] == found["kv"]["bytes"]
    assert told["kv"]["cells"] == 1024
    assert sum(told["devices"][0]["types"].values()) == read_header.read_header(model).tensor_bytes
    assert (
        sum(row["k_bytes"] + row["v_bytes"] for row in told["kv"]["layers"]) == told["kv"]["bytes"]
    )
    parts = ("weights_bytes", "repacked_bytes", "compute_bytes", "output_bytes")
    assert told["total_bytes"] == told["kv"]["bytes"] + sum(told[part] for part in parts)
    assert told["process_bytes"] == told["total_bytes"] + told["overhead_bytes"]


def test_people_get_a_receipt(llmcli: Llmcli, model: Path) -> None:
    done = llmcli(
        "plan", str(model), "-c", "512", "-np", "2", "-ctk", "q8_0", "-ctv", "q8_0", "--measure"
    )
    assert done.code == 0
    assert "512 tokens of context for 2 sequences, one pool" in done.out
    for words in ("KV cache", "difference", "it fits", "0-2", "q4_0"):
        assert words in done.out
    assert "the 64 tokens this model was trained on" in done.err
    assert "serve and batch use up to 512.0 MiB more of the free memory" in done.out
    plain = llmcli("plan", str(model)).out
    assert "whole process" in plain and "serve and batch" not in plain


def test_sequences_with_a_part_each_take_what_llama_cpp_rounds_up(
    llmcli: Llmcli, model: Path
) -> None:
    words = ("plan", str(model), "-c", "600", "-np", "3", "--json")
    told = json.loads(llmcli(*words).out)
    assert (told["kv"]["cells"], told["outside_bytes"]) == (768, 2 * Schedule().swap_bytes)
    apart = json.loads(llmcli(*words, "--no-kv-unified").out)
    assert (apart["kv"]["cells"], apart["reading_bytes"]) == (3 * 256, 0)


def test_the_context_that_reads_for_several_is_told_to_the_byte(
    llmcli: Llmcli, model: Path
) -> None:
    words = ("plan", str(model), "-c", "512", "-t", "1", "--json")
    told = json.loads(llmcli(*words, "-np", "3").out)["reading_bytes"]
    options = RunOptions(ctx_size=512, threads=1, flash_attn="off", prefill_cells=512)
    with open_runner(model, options, slots=3) as runner:
        assert told == runner.prefill_bytes
    for many in ("1", "9"):
        assert json.loads(llmcli(*words, "-np", many).out)["reading_bytes"] == 0


def test_what_scoring_takes_is_told(llmcli: Llmcli, model: Path) -> None:
    words = ("plan", str(model), "-c", "512", "-t", "1", "--json")
    told, taken = json.loads(llmcli(*words, "-np", "3", "-fa", "on").out)["scored_bytes"], []
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
            allocated = runner.context.memory_breakdown()
            assert allocated
            taken.append(
                sum(one.compute_bytes for one in allocated.buffers) + runner.context.output_bytes
            )
    assert told >= 4 * rows * vocabulary > 0
    assert (
        0 <= told - (taken[1] - taken[0]) <= 4 * 3 * vocabulary
    )  # each answer may have a row besides
    apart = json.loads(llmcli(*words, "-np", "3").out)  # the context that reads has them, too
    assert apart["reading_bytes"] and apart["scored_bytes"] > 2 * 4 * (rows - 1) * vocabulary
    assert json.loads(llmcli(*words).out)["scored_bytes"] == 0


def test_what_does_not_fit_is_told_with_what_would(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 24 << 20)
    done = llmcli("plan", str(model), "-c", "65536")
    assert done.code == 0
    assert "it does not fit" in done.out
    assert "would fit: -c " in done.out
    assert "-ctk q8_0 -ctv q8_0" in done.out
    told = json.loads(llmcli("plan", str(model), "-c", "65536", "-np", "2", "--json").out)
    assert (told["fits"], told["outside_bytes"]) == (False, 0)
    assert (
        json.loads(llmcli("plan", str(model), "-c", str(told["max_ctx"]["f16"]), "--json").out)[
            "fits"
        ]
        is True
    )
    refused = llmcli("plan", str(model), "-c", "65536", "--measure")
    assert (refused.code, refused.out) == (1, "")
    assert "does not fit and was not loaded" in refused.err


@pytest.mark.parametrize(
    ("words", "why"),
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
def test_mistakes_are_one_line(llmcli: Llmcli, model: Path, words: list[str], why: str) -> None:
    done = llmcli("plan", str(model), *words)
    assert (done.code, done.out) == (1, "")
    assert why in done.err
    assert "Traceback" not in done.err


def test_every_type_is_told_as_the_file_that_would_be_made(
    llmcli: Llmcli, stories: Path, tmp_path: Path
) -> None:
    """Sizes and totals against files that were really made."""
    from tests.quant import tiny_gguf

    whole = tiny_gguf.llama(tmp_path / "whole.gguf", layers=3)
    words = ("-c", "512", "--json")
    told = json.loads(llmcli("plan", str(whole), *words).out)
    rows = {row["type"]: row for row in told["quants"]}
    assert rows["F32"]["present"]
    assert rows["F32"]["file_bytes"] == whole.stat().st_size
    assert rows["F32"]["total_bytes"] == told["total_bytes"]
    assert not any(row["requantizes"] for row in told["quants"])
    sizes = [row["file_bytes"] for row in told["quants"]]
    assert sizes == sorted(sizes, reverse=True)
    assert rows["IQ2_XXS"]["needs_imatrix"]
    assert "MXFP4_MOE" not in rows  # it has no experts
    for name in ("Q8_0", "Q4_K_M", "Q4_0"):
        made = tmp_path / f"{name}.gguf"
        plan = plan_module.plan_quantization(write.open_gguf(whole), name)
        write.write_model(plan, made, threads=1)
        found = json.loads(llmcli("plan", str(made), *words).out)
        assert rows[name]["file_bytes"] == made.stat().st_size
        assert rows[name]["bits_per_weight"] == pytest.approx(plan.bits_per_weight, abs=1e-4)
        assert rows[name]["total_bytes"] == found["total_bytes"]
        again = {row["type"]: row for row in found["quants"]}
        assert again[name]["present"] and not again[name]["requantizes"]
        assert again["Q5_K_M"]["requantizes"]
        assert again["Q5_K_M"]["total_bytes"] == rows["Q5_K_M"]["total_bytes"]
    out = llmcli("plan", str(tmp_path / "Q4_0.gguf"), "-c", "512").out
    assert "adds its error to that" in out
    assert "adds its error to that" not in llmcli("plan", str(whole), "-c", "512").out


def test_sequences_and_what_fits_only_from_the_disk(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 64 << 20
    monkeypatch.setattr(host, "available_memory", lambda: free)
    words = ("plan", str(model), "-c", "4096", "--json")
    told = json.loads(llmcli(*words).out)
    most = told["max_parallel"]
    assert 1 < most < 256
    both = [
        json.loads(llmcli(*words, "-np", str(n), "-c", str(4096 * n)).out) for n in (most, most + 1)
    ]
    assert [one["fits"] for one in both] == [True, False]
    assert "sequences of 4,096 tokens that fit at once: " in llmcli(*words[:-1]).out
    free = told["total_bytes"] - 1
    told = json.loads(llmcli(*words).out)
    assert (told["fits"], told["runs"], told["max_parallel"]) == (False, True, 0)
    out = llmcli(*words[:-1]).out
    assert "at the speed of the disk" in out
    assert "would fit: -c 3" in out
    assert "--quant " in out


def test_a_draft_model_counts_everywhere(llmcli: Llmcli, model: Path, tmp_path: Path) -> None:
    from tests.quant import tiny_gguf

    small = tiny_gguf.llama(tmp_path / "small.gguf", layers=1)
    words = ("plan", str(model), "-c", "512", "--json")
    alone, both = (json.loads(llmcli(*words, *more).out) for more in ((), ("-md", str(small))))
    assert alone["draft_bytes"] is None
    parts = ("weights_bytes", "compute_bytes", "repacked_bytes", "output_bytes")
    assert both["total_bytes"] == both["kv"]["bytes"] + sum(both[part] for part in parts)
    draft = json.loads(
        llmcli("plan", str(small), "-c", "512", "-b", "256", "-ub", "256", "--json").out
    )
    assert both["weights_bytes"] == alone["weights_bytes"] + draft["weights_bytes"]
    assert both["kv"]["bytes"] == alone["kv"]["bytes"] + draft["kv"]["bytes"]
    assert both["draft_bytes"] >= draft["total_bytes"]  # it asks for several rows of logits
    assert both["max_ctx"]["f16"] <= alone["max_ctx"]["f16"]
    totals = [{row["type"]: row["total_bytes"] for row in one["quants"]} for one in (alone, both)]
    assert all(totals[1][name] > totals[0][name] + draft["weights_bytes"] for name in totals[0])
    assert "the draft model takes " in llmcli(*words[:-1], "-md", str(small)).out
    refused = llmcli(*words[:-1], "-md", str(small), "--measure")
    assert (refused.code, refused.out) == (2, "")
    other = tiny_gguf.llama(tmp_path / "other.gguf", layers=1, vocab=700)
    assert llmcli(*words[:-1], "-md", str(other)).code == 1


def test_layers_on_a_gpu_come_from_llama_cpp_s_devices(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is here: the dry run is told that one holds so much a layer."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    from llmcli.planning import memory_plan as planning
    from llmcli.runtime.binding.devices import Device

    header, options = read_header.read_header(model), planning.ContextOptions(512)
    monkeypatch.setattr(planning.devices, "list_devices", lambda: [Device("CPU", "", "cpu", 1, 1)])
    assert planning.largest_gpu_layers(header, options) is None

    @contextmanager
    def planner(header: Any, options: Any, layers: int, beside: Any) -> Iterator[Any]:
        share = planning.DeviceMemory("GPU0", 100 * layers, 0, 10, 5, 0, 0, free)
        yield SimpleNamespace(
            device_memory=lambda options: (
                planning.DeviceMemory("CPU", 1, 0, 0, 0, 0, 0, None),
                share,
            )
        )

    monkeypatch.setattr(planning.devices, "list_devices", lambda: [Device("GPU0", "", "gpu", 1, 1)])
    monkeypatch.setattr(planning, "open_memory_planner", planner)
    for free, most in (  # noqa: B007, planner() reads it
        (14, 0),
        (15, 0),
        (115, 1),
        (314, 2),
        (415, 4),
        (10**6, 4),
    ):
        assert planning.largest_gpu_layers(header, options) == most


def test_what_is_not_quantized_yet_is_planned_as_if_it_were(
    llmcli: Llmcli, stories: Path, tmp_path: Path
) -> None:
    """The header that would be written, against the file itself: to the byte."""
    whole, made = tmp_path / "whole.gguf", tmp_path / "q4_0.gguf"
    write.write_model(
        plan_module.plan_quantization(checkpoint_source.open_checkpoint(stories), "F32"),
        whole,
        threads=1,
    )
    write.write_model(
        plan_module.plan_quantization(write.open_gguf(whole), "Q4_0"), made, threads=1
    )
    receipts = [
        receipt(llmcli("plan", *words, "--json"))
        for words in (
            [str(whole), "--quant", "q4_0"],
            [str(stories), "--quant", "q4_0"],
            [str(made)],
        )
    ]
    assert receipts[0] == receipts[1] == receipts[2]
    refused = llmcli("plan", str(whole), "--quant", "q4_0", "--measure")
    assert refused.code == 1
    assert "not quantized to Q4_0 yet" in refused.err


def test_a_file_that_is_no_model_is_refused(llmcli: Llmcli, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    done = llmcli("plan", str(tmp_path / "bad.gguf"))
    assert done.code == 1
    assert done.err.startswith("error: ")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def receipt(done: Done) -> dict[str, Any]:
    """What does not change from one process to the next."""
    assert done.code == 0, done.err
    own = (
        "process_bytes",
        "overhead_bytes",
        "available_bytes",
        "max_ctx",
        "max_parallel",
        "devices",
    )
    told = {key: value for key, value in json.loads(done.out).items() if key not in own}
    own = (
        "process_bytes",
        "file_bytes",
        "requantizes",
        "present",
    )  # a file's keys say where it comes from
    told["quants"] = [{key: row[key] for key in row if key not in own} for row in told["quants"]]
    return told


def test_a_gguf_on_the_hub_is_planned_from_its_header(
    llmcli: Llmcli, hub: Hub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary larger than the first part; of the weights no byte is asked for, and nothing is
    left here.
    """
    from tests.quant import tiny_gguf

    monkeypatch.setattr(header_only, "FIRST_HEADER_BYTES", 2048)
    file = tiny_gguf.llama(tmp_path / "big-Q8_0.gguf", hidden=512, ff=1024, layers=6, vocab=800)
    hub.add("org/big", {"big-Q8_0.gguf": file.read_bytes()})
    there = llmcli("plan", "org/big:Q8_0", "--json")
    assert receipt(there) == receipt(llmcli("plan", str(file), "--json"))
    (first, *more) = [str(asked) for asked in hub.gets("big-Q8_0.gguf")]
    assert first == "bytes=0-2047"
    assert more
    last = max(int(asked.rpartition("-")[2]) for asked in (first, *more))
    assert last < file.stat().st_size // 10
    assert not list(home.rglob("*.gguf"))
    refused = llmcli("plan", "org/big:Q8_0", "--measure")
    assert refused.code == 1
    assert "on the hub" in refused.err


def test_shards_on_the_hub_are_planned_together(
    llmcli: Llmcli, hub: Hub, model: Path, tmp_path: Path
) -> None:
    plan = plan_module.plan_quantization(write.open_gguf(model), "Q8_0", max_shard_bytes=300_000)
    write.write_model(plan, tmp_path / "cut-Q8_0.gguf", threads=1)
    files = {file.name: file.read_bytes() for file in tmp_path.glob("cut-*.gguf")}
    assert len(files) > 1
    hub.add("org/cut", files)
    first = sorted(tmp_path.glob("cut-*.gguf"))[0]
    assert receipt(llmcli("plan", "org/cut:Q8_0", "--json")) == receipt(
        llmcli("plan", str(first), "--json")
    )


def test_a_checkpoint_on_the_hub_is_planned_as_what_would_be_made_of_it(
    llmcli: Llmcli, hub: Hub, stories: Path
) -> None:
    hub.add("org/stories", stories)
    words = ("--quant", "q4_0", "--json")
    assert receipt(llmcli("plan", "org/stories", *words)) == receipt(
        llmcli("plan", str(stories), *words)
    )
    assert "on the hub" in llmcli("plan", "org/stories:Q8_0").out


def test_what_cannot_be_looked_at_from_afar_is_told(llmcli: Llmcli, hub: Hub, model: Path) -> None:
    hub.add(
        "org/tiny", {"tiny-Q8_0.gguf": model.read_bytes(), "bad-Q4_0.gguf": b"GGUF" + bytes(5000)}
    )
    hub.ignore_range = True
    for words, why in (
        (["org/tiny:Q8_0"], "does not send parts"),
        (["org/tiny:Q8_0", "--offline"], "llmcli runs offline"),
        (["org/tiny:Q2_K"], "has no Q2_K"),
        (["smollm2:135m"], "only the hub serves parts"),
        (["org/none"], "org/none"),
    ):
        done = llmcli("plan", *words)
        assert (done.code, done.out) == (1, "")
        assert why in done.err
    hub.ignore_range = False
    assert "not a valid GGUF" in llmcli("plan", "org/tiny:Q4_0").err
