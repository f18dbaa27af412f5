from pathlib import Path

import pytest

from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.eval_callback import AttentionMix, ProductInput, _plain
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.scoring.activations import open_activations
from tests.quant import tiny_gguf


def test_a_backend_s_copy_has_the_name_of_its_original() -> None:
    assert _plain(b"CUDA0#blk.0.attn_k.weight#0") == "blk.0.attn_k.weight"
    assert _plain(b"blk.0.attn_k.weight") == "blk.0.attn_k.weight"


def test_what_the_sink_raises_comes_out_and_only_what_is_wanted_is_shown(tmp_path: Path) -> None:
    import numpy as np

    path = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=2)
    names = []

    def sink(seen: ProductInput) -> None:
        names.append((seen.name, seen.rows.shape))
        if len(names) > 1:
            raise ValueError("enough")

    ids = np.arange(32, dtype=np.int32)
    with open_model(path, gpu_layers=0) as model:
        with open_activations(
            model, ContextOptions(32), lambda name: name.endswith("ffn_down.weight"), sink
        ) as found:
            with pytest.raises(ValueError, match="enough"):
                found.read(ids)
    assert names == [(f"blk.{i}.ffn_down.weight", (1, 1, 32, 96)) for i in (0, 1)]


def test_what_enters_the_head_is_shown_though_the_head_is_not_computed(tmp_path: Path) -> None:
    import numpy as np

    path = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=2)
    seen: list[tuple[str, bytes]] = []
    asked: list[str] = []

    def wanted(name: str) -> bool:
        asked.append(name)
        return True

    ids = np.arange(32, dtype=np.int32)
    with open_model(path, gpu_layers=0) as model:
        everything = ContextOptions(32)
        with open_activations(
            model, everything, wanted, lambda one: seen.append(_kept(one))
        ) as found:
            found.read(ids)
            whole, head = seen[:], found.latest_weight
            assert head in asked
            found.narrow(wanted, head)
            for _ in range(2):
                seen.clear()
                asked.clear()
                found.read(ids)
                assert (seen, found.latest_weight) == (whole, head)
                assert "blk.1.ffn_down.weight" in asked
                assert head not in asked  # llama.cpp never came to it
            found._watcher._heads.clear()  # not known: the product itself ends the pass
            seen.clear()
            found.read(ids)
            assert seen == whole
    assert head in ("output.weight", "token_embd.weight")


def test_products_with_one_key_take_the_same_rows_and_experts(tmp_path: Path) -> None:
    import numpy as np

    path = tiny_gguf.llama(tmp_path / "moe.gguf", hidden=64, ff=96, layers=1, experts=4)
    found: dict[tuple[int, int], list[tuple[str, bytes]]] = {}

    def sink(one: ProductInput | AttentionMix) -> None:
        assert isinstance(one, ProductInput)
        entered = one.rows.tobytes() + (b"" if one.experts is None else one.experts.tobytes())
        found.setdefault(one.key, []).append((one.name, entered))

    with open_model(path, gpu_layers=0) as model:
        with open_activations(
            model, ContextOptions(32), lambda name: name.startswith("blk."), sink
        ) as activations:
            activations.read(np.arange(32, dtype=np.int32))
    shared = [sorted(name.split(".")[2] for name, _ in products) for products in found.values()]
    assert sorted(names for names in shared if len(names) > 1) == [
        ["attn_k", "attn_q", "attn_v"],
        ["ffn_gate_exps", "ffn_up_exps"],
    ]
    assert all(len({entered for _, entered in products}) == 1 for products in found.values())


def _kept(one: ProductInput | AttentionMix) -> tuple[str, bytes]:
    assert isinstance(one, ProductInput)
    return one.name, one.rows.tobytes()
