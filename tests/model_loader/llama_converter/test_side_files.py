"""`quantize --mmproj` and `convert --lora`, with a stand-in for llama.cpp's converter."""

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmcli.config import load_config
from llmcli.model_loader.llama_converter import missing_tensors
from quant.model_file import read_header
from tests.fixtures import converter as stand_in
from tests.quant import tiny_checkpoint

VISION = {"architectures": ["LlamaForConditionalGeneration"]}  # what the stand-in knows
ADAPTER = {"peft_type": "LORA", "lora_alpha": 8, "r": 4, "base_model_name_or_path": "org/base"}


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def leftovers() -> list[Path]:
    return list((load_config().cache / "conversions").rglob("*"))


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    """A checkpoint of a native family with a vision part."""
    (tmp_path / "models").mkdir()
    folder = shutil.copytree(stories, tmp_path / "models" / "tiny")
    tiny_checkpoint.edit(folder / "config.json", vision_config=VISION)
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    tensors["vision_tower.patch.weight"] = np.zeros((4, 32), np.float32)
    tiny_checkpoint.save(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("command", ["quantize", "convert"])
@pytest.mark.parametrize("chosen", ["native", "llama.cpp"])
def test_the_vision_part_is_written_beside_the_model(
    llmcli: Any, folder: Path, converter: Path, command: str, chosen: str
) -> None:
    done = llmcli(command, str(folder), "--mmproj", "--converter", chosen, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    out = folder.with_name("mmproj-tiny.gguf")
    assert document["mmproj"] == {
        "path": str(out),
        "bytes": out.stat().st_size,
        "present": False,
    }
    assert document["converter"] == chosen
    header = read_header.read_header(out)
    assert (header.architecture, len(header.tensors)) == ("clip", 1)
    assert len(files_in(folder.parent)) == 3
    assert leftovers() == []


def test_the_tool_that_runs_it_is_named_and_a_finished_file_is_kept(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    words = ("quantize", str(folder), "--q8_0", "--mmproj")
    done = llmcli(*words)
    out = folder.with_name("mmproj-tiny.gguf")
    model = folder.with_name("tiny-Q8_0.gguf")
    assert f"{out} (" in done.out
    assert f"llama-mtmd-cli -m {model} --mmproj {out}" in done.err
    time = out.stat().st_mtime_ns
    done = llmcli(*words)
    assert f"{out} is up to date: nothing to do" in done.err
    assert out.stat().st_mtime_ns == time
    done = llmcli(*words, "--force")
    assert (done.code, out.stat().st_mtime_ns > time) == (0, True)


def test_without_the_flag_a_note_says_how_to_get_it(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    for chosen in ("native", "llama.cpp"):
        done = llmcli("quantize", str(folder), "--q8_0", "--converter", chosen, "--force")
        assert (done.code, "--mmproj makes a file of" in done.err) == (0, True)
    assert files_in(folder.parent) == ["tiny", "tiny-Q8_0.gguf"]


def test_a_dry_run_writes_no_mmproj_file(llmcli: Any, folder: Path, converter: Path) -> None:
    done = llmcli("quantize", str(folder), "--mmproj", "--dry-run")
    assert done.code == 0, done.err
    assert f"would write {folder.with_name('mmproj-tiny.gguf')}" in done.out
    assert (files_in(folder.parent), leftovers()) == (["tiny"], [])


def test_a_foreign_file_is_not_replaced(llmcli: Any, folder: Path, converter: Path) -> None:
    out = folder.with_name("mmproj-tiny.gguf")
    out.write_bytes(b"something else")
    words = ("quantize", str(folder), "--q8_0", "--mmproj")
    done = llmcli(*words)
    assert (done.code, out.read_bytes()) == (1, b"something else")
    assert "was not made by llmcli, so it is not replaced" in done.err
    assert llmcli(*words, "--force").code == 0


def test_a_model_without_a_vision_part_is_refused_first(
    llmcli: Any, stories: Path, stories_gguf: Path, converter: Path, tmp_path: Path
) -> None:
    done = llmcli("quantize", str(stories), "--mmproj", "-o", str(tmp_path / "x.gguf"))
    assert (done.code, "has no vision or audio part that" in done.err) == (1, True)
    done = llmcli("quantize", str(stories_gguf), "--mmproj")
    assert (done.code, "--mmproj applies to checkpoint folders" in done.err) == (2, True)
    assert not (converter / "calls").exists()


def add_break_token(folder: Path, number: int, *, is_in_settings: bool) -> None:
    """Give the token `number` of a checkpoint the text [IMG_BREAK], in one of two files."""
    entry = {"content": "[IMG_BREAK]", "special": True}
    if is_in_settings:
        decoder = {str(number): entry}
        tiny_checkpoint.edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder)
    else:
        file = folder / "tokenizer.json"
        document = json.loads(file.read_text())
        document["added_tokens"].append(document["added_tokens"][0] | entry | {"id": number})
        file.write_text(json.dumps(document))


@pytest.mark.parametrize("is_in_settings", [True, False])
def test_the_row_of_a_token_that_the_converter_leaves_out_is_added(
    llmcli: Any, folder: Path, converter: Path, is_in_settings: bool
) -> None:
    stand_in.write_mmproj(converter / "mmproj.gguf", 0.25, projector="pixtral")
    add_break_token(folder, 300, is_in_settings=is_in_settings)
    words = ("quantize", str(folder), "--q8_0", "--mmproj", "--accept-tokenizer-differences")
    done = llmcli(*words)
    assert done.code == 0, done.err
    reader = gguf.GGUFReader(folder.with_name("mmproj-tiny.gguf"))
    values = {tensor.name: tensor.data for tensor in reader.tensors}
    weights = tiny_checkpoint.read(folder / "model.safetensors")
    assert np.array_equal(values["v.patch_embd.weight"], np.full((4, 32), 0.25, np.float32))
    assert np.array_equal(
        values["v.token_embd.img_break"], weights["model.embed_tokens.weight"][300]
    )
    assert len(values) == 2
    assert leftovers() == []
    done = llmcli(*words)
    assert "mmproj-tiny.gguf is up to date: nothing to do" in done.err


def test_a_file_that_llama_cpp_would_not_load_is_refused(
    llmcli: Any, folder: Path, converter: Path
) -> None:
    stand_in.write_mmproj(converter / "mmproj.gguf", projector="pixtral")
    done = llmcli("quantize", str(folder), "--q8_0", "--mmproj")
    assert done.code == 1
    assert "leaves out v.token_embd.img_break, without which" in done.err
    assert f"{folder} has no embedding of [IMG_BREAK]" in done.err
    assert not folder.with_name("mmproj-tiny.gguf").exists()
    assert leftovers() == []


def test_a_finished_file_that_llama_cpp_would_not_load_is_refused(
    llmcli: Any, folder: Path, converter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("quantize", str(folder), "--q8_0", "--mmproj")
    assert llmcli(*words).code == 0
    monkeypatch.setitem(missing_tensors.NEEDED_TENSORS, "mlp", ("v.missing", "[MISSING]"))
    done = llmcli(*words)
    assert (done.code, "leaves out v.missing, without which" in done.err) == (1, True)


def test_undefined_weights_are_refused(llmcli: Any, folder: Path, converter: Path) -> None:
    stand_in.write_mmproj(converter / "mmproj.gguf", float("inf"))
    done = llmcli("quantize", str(folder), "--q8_0", "--mmproj")
    assert done.code == 1
    assert "v.patch_embd.weight contains NaN or infinite values" in done.err
    assert files_in(folder.parent) == ["tiny"]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters" / "style"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    tensors = {"base_model.model.x.lora_A.weight": np.ones((4, 64), np.float32)}
    tiny_checkpoint.save(folder / "adapter_model.safetensors", tensors, "F16")
    return folder


def test_an_adapter_becomes_a_gguf(
    llmcli: Any, adapter: Path, stories: Path, converter: Path
) -> None:
    done = llmcli("convert", str(stories), "--lora", str(adapter), "--json")
    assert done.code == 0, done.err
    out = adapter.with_name("style-lora.gguf")
    assert json.loads(done.out) == {
        "path": str(out),
        "bytes": out.stat().st_size,
        "architecture": "llama",
        "base": str(stories),
        "alpha": 8.0,
        "tensors": 2,
        "dry_run": False,
        "present": False,
    }
    assert str(stories).encode() not in out.read_bytes()
    words = (converter / "calls").read_text()
    assert f"{adapter} --base {stories} --outtype f16" in words
    done = llmcli("convert", "--lora", str(adapter), str(stories))
    assert "nothing to do" in done.err
    assert f"llama-cli -m MODEL.gguf --lora {out}" in done.err
    assert (files_in(adapter.parent), leftovers()) == (["style", "style-lora.gguf"], [])


def test_the_base_model_is_that_of_the_adapter(
    llmcli: Any, adapter: Path, stories: Path, converter: Path
) -> None:
    tiny_checkpoint.edit(adapter / "adapter_config.json", base_model_name_or_path=str(stories))
    done = llmcli("convert", "--lora", str(adapter), "--outtype", "q8_0", "--dry-run")
    assert done.code == 0, done.err
    assert "would write" in done.out
    assert "--outtype q8_0" in (converter / "calls").read_text()
    tiny_checkpoint.edit(adapter / "adapter_config.json", base_model_name_or_path=None)
    done = llmcli("convert", "--lora", str(adapter))
    assert done.code == 1
    assert f"{adapter} does not name the model that it changes" in done.err
    assert f"llmcli convert BASE --lora {adapter}" in done.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True, "use_rslora": True}, "use_dora is set; use_rslora is set"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern gives tensors different alphas"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules"),
        ({"peft_type": "IA3"}, "its kind is IA3"),
        ({"lora_alpha": None}, "it has no lora_alpha"),
        ({"lora_alpha": [8]}, "it has no lora_alpha"),
        ({"bias": "all"}, "it trains biases"),
    ],
)
def test_what_a_gguf_adapter_cannot_hold_is_refused(
    llmcli: Any,
    adapter: Path,
    stories: Path,
    converter: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    tiny_checkpoint.edit(adapter / "adapter_config.json", **changes)
    done = llmcli("convert", str(stories), "--lora", str(adapter))
    assert (done.code, "cannot be a GGUF adapter" in done.err) == (1, True)
    assert message in done.err
    assert not (converter / "calls").exists()


def test_an_adapter_without_files_or_pairs_is_refused(
    llmcli: Any, adapter: Path, stories: Path, converter: Path, tmp_path: Path
) -> None:
    words = ("convert", str(stories), "--lora")
    assert "has no adapter_config.json" in llmcli(*words, str(stories)).err
    assert "there is no folder" in llmcli(*words, str(tmp_path / "nothing")).err
    stand_in.write_adapter(converter / "adapter.gguf", rank=3)
    done = llmcli(*words, str(adapter))
    assert (done.code, "attn_q.weight has no fitting pair" in done.err) == (1, True)
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no weights" in llmcli(*words, str(adapter)).err
    assert files_in(adapter.parent) == ["style"]


def test_usage_of_convert(llmcli: Any, adapter: Path, stories: Path, converter: Path) -> None:
    done = llmcli("convert")
    assert (done.code, "convert needs a checkpoint" in done.err) == (2, True)
    for flag in ("--mmproj", "--no-mtp", "--keep-source", "--accept-tokenizer-differences"):
        done = llmcli("convert", "--lora", str(adapter), flag)
        assert (done.code, f"{flag} does not apply to --lora" in done.err) == (2, True)


def logits(path: Path, adapter: Path | None = None) -> np.ndarray:
    """Return llama.cpp's logits of 64 tokens, with an adapter if one is given."""
    import llama_cpp.llama_cpp as lib

    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = 256, 1, 1
    context = lib.llama_init_from_model(model, settings)
    if adapter:
        loaded = lib.llama_adapter_lora_init(model, str(adapter).encode())
        assert loaded
        adapters = (lib.llama_adapter_lora_p_ctypes * 1)(loaded)
        assert lib.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
    batch = lib.llama_batch_init(64, 0, 1)
    batch.n_tokens = 64
    for index, token in enumerate(np.random.default_rng(0).integers(3, 500, 64)):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = int(token), index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, 1
    assert lib.llama_decode(context, batch) == 0
    size = 64 * lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    values = np.ctypeslib.as_array(lib.llama_get_logits(context), (size,)).copy()
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return values


def test_the_real_converters_adapter_computes_as_the_merged_model(
    llmcli: Any, stories: Path, stories_gguf: Path, real_converter: Path, tmp_path: Path
) -> None:
    tensors = tiny_checkpoint.read(stories / "model.safetensors")
    merged, low_rank = dict(tensors), {}
    rng = np.random.default_rng(1)
    for name, weights in tensors.items():
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"):
            first = rng.standard_normal((4, weights.shape[1])).astype(np.float32) * 0.2
            second = rng.standard_normal((weights.shape[0], 4)).astype(np.float32) * 0.2
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            low_rank |= {f"{stem}.lora_A.weight": first, f"{stem}.lora_B.weight": second}
            merged[name] = weights + 8 / 4 * (second @ first)
    adapter = tmp_path / "style"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(ADAPTER))
    tiny_checkpoint.save(adapter / "adapter_model.safetensors", low_rank)
    other = shutil.copytree(stories, tmp_path / "merged")
    tiny_checkpoint.save(other / "model.safetensors", merged)
    done = llmcli("convert", str(stories), "--lora", str(adapter))
    assert done.code == 0, done.err
    assert (
        llmcli("convert", str(other), "--outtype", "f32", "-o", str(tmp_path / "m.gguf")).code == 0
    )
    expected = logits(tmp_path / "m.gguf")
    error = logits(stories_gguf, tmp_path / "style-lora.gguf") - expected
    assert (error**2).sum() < 1e-6 * (expected**2).sum()
    assert ((logits(stories_gguf) - expected) ** 2).sum() > 0.1 * (expected**2).sum()
