"""Folds do not change the logits of llama.cpp, for every architecture that supports folds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant import folds
from quant.errors import UserError
from quant.quantize import plan
from quant.quantize.write import open_gguf, write_model
from quant.source.source import Source
from tests.quant import families, tiny_gguf

KINDS = {"norm", "hidden", "value", "head", "residual"}
HIDDEN, FF, HEADS, LAYERS = 64, 96, 4, 2
TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 300, 24)]
QKV = {"attn_q.bias": (64,), "attn_k.bias": (32,), "attn_v.bias": (32,)}
HEAD_NORMS = {"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)}
POST = {"post_attention_norm.weight": (64,), "post_ffw_norm.weight": (64,)}
SIZES = {"attention.key_length": 16, "attention.value_length": 16}
FUSED_UP = {"ffn_up.weight": (2 * FF, 64)}
FUSED_QKV = {"attn_qkv.weight": (128, 64)}
SPLIT_QKV = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
EXPERTS = {"expert_feed_forward_length": FF}
SHARED = {
    "ffn_gate_inp_shexp.weight": (64,),
    "ffn_gate_shexp.weight": (FF, 64),
    "ffn_up_shexp.weight": (FF, 64),
    "ffn_down_shexp.weight": (64, FF),
}
GRANITE = {
    "logit_scale": 3.0,
    "residual_scale": 0.5,
    "embedding_scale": 2.0,
    "attention.scale": 0.1,
}
LATENT = {
    "attn_q_a.weight": (24, 64),
    "attn_q_a_norm.weight": (24,),
    "attn_q_b.weight": (96, 24),
    "attn_kv_a_mqa.weight": (40, 64),
    "attn_kv_a_norm.weight": (32,),
    "attn_k_b.weight": (4, 32, 16),
    "attn_v_b.weight": (4, 12, 32),
    "attn_output.weight": (64, 48),
    **{role: shape for role, shape in SHARED.items() if "inp" not in role},
}
LATENT_SETTINGS = {
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 0,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    **EXPERTS,
}
OPEN_AI = {
    "attn_output.bias": (64,),
    "attn_sinks.weight": (4,),
    "ffn_gate_inp.bias": (4,),
    "ffn_gate_exps.bias": (4, FF),
    "ffn_up_exps.bias": (4, FF),
    "ffn_down_exps.bias": (4, 64),
    "post_attention_norm.weight": (64,),
    **QKV,
}
LLAMA = {
    "attn_output.bias": (64,),
    "ffn_gate.bias": (FF,),
    "ffn_up.bias": (FF,),
    "ffn_down.bias": (64,),
    **QKV,
}


@dataclass(frozen=True)
class Graph:
    """A tiny model of an architecture.

    `block` has the shapes of tensors that each block has in addition to those of llama, by role.
    `without` names tensors of llama that the architecture does not have.
    """

    arch: str
    block: dict[str, tuple[int, ...]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    tied: bool = False
    experts: int = 0
    kv_heads: int = 2

    def write(self, path: Path) -> Path:
        extra = {
            f"blk.{i}.{role}": shape for i in range(LAYERS) for role, shape in self.block.items()
        }
        return tiny_gguf.llama(
            path,
            hidden=HIDDEN,
            ff=FF,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=self.kv_heads,
            arch=self.arch,
            tied=self.tied,
            experts=self.experts,
            extra=extra,
            settings=self.settings,
            without=self.without,
        )


GRAPHS = (
    Graph("llama", LLAMA),
    Graph("llama", tied=True),
    Graph("llama", experts=4),
    Graph("mistral3"),
    Graph("qwen2", QKV),
    Graph("qwen3", HEAD_NORMS, tied=True),
    Graph("qwen2moe", SHARED | QKV, EXPERTS | {"expert_shared_feed_forward_length": FF}, experts=4),
    Graph("qwen3moe", HEAD_NORMS, EXPERTS, experts=4),
    Graph("gemma", {}, SIZES, tied=True),
    Graph("gemma2", POST, SIZES | {"attention.sliding_window": 16}, tied=True),
    Graph("gemma3", POST | HEAD_NORMS, tied=True),
    Graph("granite", {}, GRANITE),
    Graph("granitemoe", {}, GRANITE, experts=4),
    Graph("smollm3", tied=True),
    Graph(
        "phi3",
        FUSED_UP | FUSED_QKV,
        {"attention.sliding_window": 0},
        (*SPLIT_QKV, "ffn_gate.weight"),
    ),
    Graph("glm4", FUSED_UP | POST | QKV, {}, ("ffn_gate.weight",)),
    Graph(
        "olmo2",
        POST | {"attn_q_norm.weight": (64,), "attn_k_norm.weight": (32,)},
        {},
        (".attn_norm.weight", ".ffn_norm.weight"),
    ),
    Graph(
        "gpt-oss",
        OPEN_AI,
        SIZES | EXPERTS | {"attention.sliding_window": 8},
        (".ffn_norm.weight",),
        experts=4,
    ),
    Graph("deepseek2", LATENT, LATENT_SETTINGS, SPLIT_QKV, experts=4, kv_heads=1),
)


def test_every_supported_architecture_has_a_graph() -> None:
    assert {graph.arch for graph in GRAPHS} == folds.FREE_CHANNELS.keys()


@pytest.mark.parametrize(
    "graph", GRAPHS, ids=lambda graph: f"{graph.arch}{' tied' * graph.tied}{graph.experts or ''}"
)
def test_folds_do_not_change_the_logits(graph: Graph, tmp_path: Path) -> None:
    path = graph.write(tmp_path / "model.gguf")
    source, out = open_gguf(path), tmp_path / "folded.gguf"
    assert {site.kind for site in folds.find_sites(source)} | missing_kinds(graph) == KINDS
    write_model(
        plan.plan_quantization(folds.fold_source(source, random_folds(source)), "F32"),
        out,
        threads=1,
    )
    assert families.nmse(logits(out), logits(path)) < 1e-6


def missing_kinds(graph: Graph) -> set[str]:
    """Return the kinds of fold sites that the model does not have."""
    return ({"head"} if graph.tied else set()) | ({"norm"} if graph.arch == "olmo2" else set())


def random_folds(source: Source) -> list[folds.Fold]:
    """Return a random fold for every site, with factors and a channel order where they are free."""
    random = np.random.default_rng(2)
    return [
        folds.Fold(site, random_factors(random, site), random_order(random, site))
        for site in folds.find_sites(source)
    ]


def random_factors(random: np.random.Generator, site: folds.FoldSite) -> np.ndarray | None:
    return (
        np.exp2(random.uniform(-1, 1, site.width)).astype(np.float32)
        if site.has_free_factors
        else None
    )


def random_order(random: np.random.Generator, site: folds.FoldSite) -> np.ndarray | None:
    """Return a random order of the channels within their groups, or None if the order is fixed."""
    if not site.group_size:
        return None
    return np.concatenate(
        [
            start + random.permutation(site.group_size)
            for start in range(0, site.width, site.group_size)
        ]
    )


def logits(path: Path) -> np.ndarray:
    """Return llama.cpp's logits of TOKENS, computed on one thread with an F32 KV cache."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=64,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        flash_attn=False,
        verbose=False,
        type_k=0,
        type_v=0,
    )
    model.eval(TOKENS)
    scores = np.array(model.scores[: len(TOKENS)])
    model.close()
    return scores


def test_every_channel_and_every_tensor_of_a_tied_model_changes(tmp_path: Path) -> None:
    source = open_gguf(Graph("llama", tied=True).write(tmp_path / "model.gguf"))
    folded = folds.fold_source(source, folds.randomize(source, 1))
    assert folded.fingerprint == source.fingerprint and folded.fold_digest == folds.digest_folds(
        folds.randomize(source, 1)
    )
    assert folded.fold_digest != folds.digest_folds(folds.randomize(source, 2))
    assert folded.fold_digest.encode() in dict(folded.entries)["llmcli.quantize.fold"]
    for old, new in zip(source.weights, folded.weights, strict=True):
        before, after = (weight.read(0, weight.rows).view(np.float32) for weight in (old, new))
        assert (old.name, old.shape, "F32") == (new.name, new.shape, new.type)
        assert ((before != after).mean(0) > 0.9).mean() > 0.9, old.name


@pytest.mark.parametrize(("first", "last"), [(0, 300), (7, 8), (100, 250)])
def test_rows_read_in_spans_equal_one_read(first: int, last: int, tmp_path: Path) -> None:
    source = open_gguf(Graph("llama", experts=4).write(tmp_path / "model.gguf"))
    folded = folds.fold_source(source, random_folds(source))
    for weight in folded.weights:
        rows = slice(min(first, weight.rows - 1), min(last, weight.rows))
        assert (weight.read(rows.start, rows.stop) == weight.read(0, weight.rows)[rows]).all()


def test_statistics_of_the_inputs_are_folded(tmp_path: Path) -> None:
    source = open_gguf(Graph("llama").write(tmp_path / "model.gguf"))
    edit = folds.combine_folds(random_folds(source))["blk.1.ffn_down.weight"]
    inputs = np.random.default_rng(3).normal(size=(50, FF)).astype(np.float32)
    assert edit.column_factors is not None and edit.column_order is not None
    after = (inputs / edit.column_factors)[:, edit.column_order[0]]
    assert np.allclose(edit.fold_moments(inputs.T @ inputs), after.T @ after, rtol=1e-4, atol=1e-4)
    assert np.allclose(
        edit.fold_mean_squares(np.square(inputs).mean(0)), np.square(after).mean(0), rtol=1e-4
    )


def test_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    source = open_gguf(tiny_gguf.mamba(tmp_path / "model.gguf"))
    with pytest.raises(UserError, match="mamba") as caught:
        folds.find_sites(source)
    assert "qwen3moe" in caught.value.hint


def test_block_with_an_unknown_tensor_and_the_residual_have_no_sites(
    tmp_path: Path,
) -> None:
    path = tiny_gguf.llama(
        tmp_path / "model.gguf",
        hidden=64,
        ff=96,
        layers=2,
        extra={"blk.1.attn_extra.weight": (4, 64)},
    )
    sites = folds.find_sites(open_gguf(path))
    assert {site.name.split(".")[1] for site in sites} == {"0"}
