"""The eval callback passes the inputs of wanted products to its sink, and can end a pass early."""

from pathlib import Path

import pytest

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.eval_callback import AttentionMix, ProductInput, _base_name
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.scoring.activations import open_activations
from tests.quant import tiny_gguf


def test_a_copy_on_another_device_has_the_name_of_its_original() -> None:
    assert _base_name(b"CUDA0#blk.0.attn_k.weight#0") == "blk.0.attn_k.weight"
    assert _base_name(b"blk.0.attn_k.weight") == "blk.0.attn_k.weight"


def test_the_sink_gets_only_wanted_products_and_its_exception_is_raised(tmp_path: Path) -> None:
    import numpy as np

    path = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=2)
    names = []

    def sink(seen: ProductInput) -> None:
        names.append((seen.name, seen.rows.shape))
        if len(names) > 1:
            raise ValueError("enough")

    ids = np.arange(32, dtype=np.int32)
    with open_model(path, ON_HOST) as model:
        with open_activations(
            model, ContextOptions(32), lambda name: name.endswith("ffn_down.weight"), sink
        ) as found:
            with pytest.raises(ValueError, match="enough"):
                found.read(ids)
    assert names == [(f"blk.{i}.ffn_down.weight", (1, 1, 32, 96)) for i in (0, 1)]


def test_the_sink_gets_the_input_of_the_head_although_the_head_is_not_computed(
    tmp_path: Path,
) -> None:
    import numpy as np

    path = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=2)
    seen: list[tuple[str, bytes]] = []
    requested_names: list[str] = []

    def is_wanted(name: str) -> bool:
        requested_names.append(name)
        return True

    ids = np.arange(32, dtype=np.int32)
    with open_model(path, ON_HOST) as model:
        options = ContextOptions(32)
        with open_activations(
            model, options, is_wanted, lambda product: seen.append(name_and_bytes(product))
        ) as found:
            found.read(ids)
            all_products, head = seen[:], found.latest_weight
            assert head in requested_names
            found.narrow(is_wanted, head)
            for _ in range(2):
                seen.clear()
                requested_names.clear()
                found.read(ids)
                assert (seen, found.latest_weight) == (all_products, head)
                assert "blk.1.ffn_down.weight" in requested_names
                assert head not in requested_names  # llama.cpp did not get to this product
            # if the head is not recognized, its product ends the pass
            found._watcher._heads.clear()
            seen.clear()
            found.read(ids)
            assert seen == all_products
    assert head in ("output.weight", "token_embd.weight")


def test_products_with_equal_keys_have_the_same_rows_and_experts(tmp_path: Path) -> None:
    import numpy as np

    path = tiny_gguf.llama(tmp_path / "moe.gguf", hidden=64, ff=96, layers=1, experts=4)
    found: dict[tuple[int, int], list[tuple[str, bytes]]] = {}

    def sink(product: ProductInput | AttentionMix) -> None:
        assert isinstance(product, ProductInput)
        inputs = product.rows.tobytes() + (
            b"" if product.experts is None else product.experts.tobytes()
        )
        found.setdefault(product.key, []).append((product.name, inputs))

    with open_model(path, ON_HOST) as model:
        with open_activations(
            model, ContextOptions(32), lambda name: name.startswith("blk."), sink
        ) as activations:
            activations.read(np.arange(32, dtype=np.int32))
    shared = [sorted(name.split(".")[2] for name, _ in products) for products in found.values()]
    assert sorted(names for names in shared if len(names) > 1) == [
        ["attn_k", "attn_q", "attn_v"],
        ["ffn_gate_exps", "ffn_up_exps"],
    ]
    assert all(len({inputs for _, inputs in products}) == 1 for products in found.values())


def name_and_bytes(product: ProductInput | AttentionMix) -> tuple[str, bytes]:
    assert isinstance(product, ProductInput)
    return product.name, product.rows.tobytes()
