import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.commands.eval import words_of
from quant import container, imatrix
from tests.commands.conftest import Done
from tests.quant import tiny

Llmcli = Callable[..., Done]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 400 of the tiny models' tokens: nearly a byte each."""
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 6, encoding="utf-8")
    return path


def means(path: Path, name: str) -> Any:
    entry = imatrix.load(path).entries[name]
    return entry.vectors(0, 1, entry.count)[0]


def test_sums_are_those_of_transformers_own_activations(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, text: Path, tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from llmcli.runtime.binding.model import open_model

    out = tmp_path / "stats.gguf"
    done = llmcli(
        "calibrate", str(stories_gguf), "-o", str(out), "--text", str(text), "--ctx", "64", "-t", "1", "--json"
    )
    assert done.code == 0, done.err
    told = json.loads(done.out)
    with open_model(stories_gguf, vocab_only=True) as vocabulary:
        ids = vocabulary.tokenize(text.read_text().removesuffix("\n"), special=False, add_special=True)
        bos = vocabulary.bos
    chunks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    chunks[:, 0] = bos
    assert (told["chunks"], told["tokens"]) == (len(chunks), chunks.numel())
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    layers = model.model.layers
    seen: dict[str, Any] = {}
    for name, module in {
        "blk.0.attn_q.weight": layers[0].self_attn.q_proj, "blk.2.attn_v.weight": layers[2].self_attn.v_proj,
        "blk.4.attn_output.weight": layers[4].self_attn.o_proj, "blk.4.ffn_up.weight": layers[4].mlp.up_proj,
        "blk.4.ffn_down.weight": layers[4].mlp.down_proj, "token_embd.weight": model.lm_head,
    }.items():  # fmt: skip
        module.register_forward_hook(lambda _, entered, __, name=name: seen.update({name: entered[0].double()}))
    with torch.inference_mode():
        model(chunks)
    for name, entered in seen.items():
        want = entered.square().mean((0, 1)).numpy()
        found = means(out, name)
        assert np.linalg.norm(found - want) < 2e-3 * np.linalg.norm(want), name


def test_llama_s_own_names_counts_and_keys(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=2)
    out = tmp_path / "stats.gguf"
    words = ("calibrate", str(model), "-o", str(out), "--text", str(text), "--ctx", "32", "--chunks", "3", "-t", "1")
    done = llmcli(*words)
    assert done.code == 0, done.err
    assert "15 tensors over 96 tokens in 3 chunks of 32" in done.out
    found = imatrix.load(out)
    assert (found.chunks, found.dataset) == (3, str(text))
    matrices = {tensor.name for tensor in container.read(model).tensors if len(tensor.shape) > 1}
    assert set(found.entries) == matrices - {"token_embd.weight"}
    assert {entry.divisors for entry in found.entries.values()} == {(96.0,)}
    assert np.array_equal(means(out, "blk.0.attn_q.weight"), means(out, "blk.0.attn_k.weight"))
    raw = out.read_bytes()
    assert llmcli(*words).code == 0
    assert out.read_bytes() == raw


def test_each_expert_has_sums_of_its_own(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny.llama(tmp_path / "moe.gguf", hidden=64, ff=96, layers=1, experts=4)
    out = tmp_path / "stats.gguf"
    done = llmcli("calibrate", str(model), "-o", str(out), "--text", str(text), "--ctx", "32", "-t", "1")
    assert done.code == 0, done.err
    entries = imatrix.load(out).entries
    up, gate, router = (entries[f"blk.0.{role}.weight"] for role in ("ffn_up_exps", "ffn_gate_exps", "ffn_gate_inp"))
    (tokens,) = router.divisors
    assert len(up.divisors) == 4
    assert sum(up.divisors) == 2 * tokens
    assert up.divisors == gate.divisors
    share = np.array(up.divisors) / sum(up.divisors)
    each = up.vectors(0, 4, 64)
    # Every token goes to two experts: their sums together are twice those of the router, which sees the same rows.
    assert np.allclose(share @ each, router.vectors(0, 1, 64)[0], rtol=1e-5)


def test_quantize_takes_it(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny.llama(tmp_path / "tiny.gguf", hidden=256, ff=256, layers=1, tied=True)
    out = tmp_path / "stats.gguf"
    assert llmcli("calibrate", str(model), "-o", str(out), "--text", str(text), "--ctx", "32", "-t", "1").code == 0
    small = tmp_path / "small.gguf"
    done = llmcli("quantize", str(model), "--q2_k", "--imatrix", str(out), "-o", str(small))
    assert done.code == 0, done.err
    assert "does not speak of" not in done.err  # of the tied head too
    assert container.read(small).metadata["quantize.imatrix.entries_count"] == 8


def test_mistakes_are_one_line(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    shipped, out = tmp_path / "plays.txt", tmp_path / "stats.gguf"
    shipped.write_text(words_of(None)[0], encoding="utf-8")
    norm = next(one for one in container.read(model).tensors if one.name == "blk.0.attn_norm.weight")
    raw = bytearray(model.read_bytes())
    raw[norm.offset : norm.offset + 4] = np.float32(np.nan).tobytes()
    (broken := tmp_path / "nan.gguf").write_bytes(raw)
    for words, why in (
        ((str(model), "--text", str(shipped)), "nothing may be calibrated with it"),
        ((str(model), "--text", str(text)), "chunks of 512 need at least 1024"),
        ((str(broken), "--text", str(text), "--ctx", "32"), "what enters blk.0.attn_"),
    ):
        done = llmcli("calibrate", *words, "-o", str(out), "-t", "1")
        assert (done.code, done.out) == (1, ""), words
        assert why in done.err
        assert not out.exists()
