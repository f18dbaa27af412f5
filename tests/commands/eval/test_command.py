"""`llmcli eval`: perplexity against transformers, comparison with a base, resuming, and errors."""

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.scoring import chunk_scorer
from llmcli.workflows.evaluation import evaluate, models
from llmcli.workflows.evaluation.models import open_scorers
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from quant.record_log import RecordLog
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 900 tokens for the stories model."""
    evaluation_text = (resources.files("quant") / "texts" / "evaluation.txt").read_text(
        encoding="utf-8"
    )
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(evaluation_text[:1600] + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def small_gguf(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stories model in Q4_0."""
    out = tmp_path_factory.mktemp("small") / "stories260K-Q4_0.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(stories), "Q4_0"), out, threads=1
    )
    return out


@pytest.fixture
def evaluate_json(llmcli: Llmcli, text: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `eval` in chunks of 64 tokens and returns its JSON.

    The JSON lacks `elapsed_ms`, so that two runs compare equal.
    """

    def call(*words: str | Path) -> dict[str, Any]:
        text_flags = () if "--base-logits" in words else ("--text", str(text), "--ctx", "64")
        done = llmcli("eval", *map(str, words), *text_flags, "-t", "1", "--json")
        assert done.code == 0, done.err
        document = json.loads(done.out)
        document.pop("elapsed_ms")
        return document

    return call


def test_perplexity_equals_that_of_transformers(
    evaluate_json: Callable[..., Any], stories: Path, stories_gguf: Path, text: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from llmcli.runtime.binding.model import open_model

    with open_model(stories_gguf, vocab_only=True) as model:
        ids = model.tokenize(
            text.read_text(encoding="utf-8").removesuffix("\n"), special=False, add_special=True
        )
        bos = model.bos
    chunks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    chunks[:, 0] = bos
    with torch.inference_mode():
        logits = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)(
            chunks
        ).logits
    logp = torch.log_softmax(logits[:, 32:-1].double(), -1)
    nll = -logp.gather(-1, chunks[:, 33:, None]).flatten()
    document = evaluate_json(stories_gguf, *EXACT)
    assert (document["chunks"], document["positions"]) == (len(chunks), len(nll))
    assert document["perplexity"]["value"] == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    error = float(nll.mean().exp() * nll.std(unbiased=True) / len(nll) ** 0.5)
    assert document["perplexity"]["error"] == pytest.approx(error, rel=1e-3)


def test_a_quantized_file_is_compared_with_its_base(
    evaluate_json: Callable[..., Any], small_gguf: Path, stories_gguf: Path
) -> None:
    document = evaluate_json(small_gguf, "--base", stories_gguf)
    base_document = evaluate_json(stories_gguf)
    assert document["base_perplexity"]["value"] == pytest.approx(
        base_document["perplexity"]["value"], rel=1e-9
    )
    assert document["perplexity_ratio"]["value"] == pytest.approx(
        document["perplexity"]["value"] / document["base_perplexity"]["value"]
    )
    assert 0.001 < document["kl_divergence"]["value"] < 0.5
    assert 0.5 < document["same_top"]["value"] < 1
    self_document = evaluate_json(stories_gguf, "--base", stories_gguf)
    assert self_document["kl_divergence"]["maximum"] < 1e-6
    assert self_document["same_top"] == {"value": 1, "error": 0}


def test_a_kv_cache_type_is_compared_with_f16(
    evaluate_json: Callable[..., Any], stories_gguf: Path
) -> None:
    keys = evaluate_json(stories_gguf, "--base", stories_gguf, "-ctk", "bf16")
    both = evaluate_json(stories_gguf, "--base", stories_gguf, "-ctk", "bf16", "-ctv", "bf16")
    assert (keys["type_k"], keys["type_v"]) == ("bf16", "f16")
    assert 1e-6 < keys["kl_divergence"]["value"] < both["kl_divergence"]["value"]


def test_a_killed_evaluation_resumes_with_the_same_result(
    llmcli: Llmcli,
    evaluate_json: Callable[..., Any],
    small_gguf: Path,
    stories_gguf: Path,
    text: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (small_gguf, "--base", stories_gguf, "-b", "128")  # two chunks in one forward pass
    uninterrupted = evaluate_json(*words)
    (journal,) = (home / "cache" / "evaluations").glob("*.records")
    raw = journal.read_bytes()
    assert evaluate_json(*words, "--fresh")["resumed_chunks"] == 0
    assert journal.read_bytes() == raw
    journal.write_bytes(raw[: len(raw) * 2 // 3])  # as after a kill during a write
    resumed = evaluate_json(*words)
    assert 0 < resumed.pop("resumed_chunks") < uninterrupted["chunks"]
    assert resumed == {
        key: value for key, value in uninterrupted.items() if key != "resumed_chunks"
    }

    append, count = RecordLog.append, 0

    def interrupt_third_append(self: RecordLog, records: dict[int, bytes]) -> None:
        nonlocal count
        append(self, records)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RecordLog, "append", interrupt_third_append)
    fresh_words = (
        "eval",
        *map(str, words),
        "--text",
        str(text),
        "--ctx",
        "64",
        "-t",
        "1",
        "--fresh",
    )
    assert llmcli(*fresh_words).code == 130
    monkeypatch.setattr(RecordLog, "append", append)
    assert evaluate_json(*words)["resumed_chunks"] == 6


def test_a_change_of_the_model_file_starts_again(
    evaluate_json: Callable[..., Any], small_gguf: Path, tmp_path: Path
) -> None:
    model_file = Path(shutil.copy2(small_gguf, tmp_path / "own.gguf"))
    before = evaluate_json(model_file, "--save-base", tmp_path / "base")
    assert evaluate_json(model_file)["resumed_chunks"] == before["chunks"]
    tensor = next(
        tensor
        for tensor in read_header.read_header(model_file).tensors
        if tensor.name == "blk.0.ffn_down.weight"
    )
    with model_file.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float16(8).tobytes())  # the scale of the tensor's first block
    after = evaluate_json(model_file, "--save-base", tmp_path / "base")
    assert after["resumed_chunks"] == 0
    assert after["perplexity"]["value"] != before["perplexity"]["value"]
    assert (
        evaluate_json(model_file, "--base-logits", tmp_path / "base")["kl_divergence"]["value"]
        < 1e-4
    )


def test_a_change_of_the_base_starts_again_with_the_new_base_logits(
    evaluate_json: Callable[..., Any], small_gguf: Path, stories_gguf: Path, tmp_path: Path
) -> None:
    base, file = Path(shutil.copy2(small_gguf, tmp_path / "own.gguf")), tmp_path / "base"
    evaluate_json(base, "--save-base", file)
    before = evaluate_json(stories_gguf, "--base-logits", file)
    assert evaluate_json(stories_gguf, "--base-logits", file)["resumed_chunks"] == before["chunks"]
    tensor = next(
        tensor
        for tensor in read_header.read_header(base).tensors
        if tensor.name == "blk.0.ffn_down.weight"
    )
    with base.open("r+b") as stream:
        stream.seek(tensor.offset)
        stream.write(np.float16(8).tobytes())
    evaluate_json(base, "--save-base", file)
    after = evaluate_json(stories_gguf, "--base-logits", file)
    assert after["resumed_chunks"] == 0
    assert after["kl_divergence"]["value"] != before["kl_divergence"]["value"]


def test_a_change_of_the_kv_cache_rotation_starts_again(
    evaluate_json: Callable[..., Any], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (stories_gguf, "-ctk", "bf16")
    assert evaluate_json(*words)["resumed_chunks"] == 0
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert evaluate_json(*words)["resumed_chunks"] == 0
    monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE")
    assert evaluate_json(*words)["resumed_chunks"] > 0


def test_other_settings_start_again_and_more_chunks_resume(
    llmcli: Llmcli, stories_gguf: Path, text: Path
) -> None:
    words = ("eval", str(stories_gguf), "--text", str(text), "-t", "1")
    assert "starting again" not in llmcli(*words, "--ctx", "64", "--chunks", "2").err
    assert (
        "2 of 3 chunks were computed before" in llmcli(*words, "--ctx", "64", "--chunks", "3").err
    )
    done = llmcli(*words, "--ctx", "32", "-ctk", "bf16")
    assert (
        "starting again: the last evaluation of this model had other values of: --ctx, -ctk"
        in done.err
    )
    assert "computed before" not in done.err


def test_alternating_models_gives_the_same_result(
    evaluate_json: Callable[..., Any],
    small_gguf: Path,
    stories_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (small_gguf, "--base", stories_gguf, "-b", "128")
    expected = evaluate_json(*words)
    monkeypatch.setattr(evaluate, "both_fit", lambda model, base: False)
    with monkeypatch.context() as patch:
        patch.setattr(models, "MAX_BUFFERED_BYTES", 3 * 4 * 512 * 31 * 2)  # three groups of chunks
        assert evaluate_json(*words, "--fresh") == expected
    loads = 0

    def count_loads(*args: Any) -> Any:
        nonlocal loads
        loads += 1
        return open_scorers(*args)

    monkeypatch.setattr(models, "open_scorers", count_loads)
    # The buffer may use half of the available memory: the logits of one group of chunks.
    monkeypatch.setattr(models.host, "available_memory", lambda: 2 * 4 * 512 * 31 * 2)
    assert evaluate_json(*words, "--fresh") == expected
    assert loads == 2 * -(-expected["chunks"] // 2)


def test_batch_sizes_change_perplexity_only_by_rounding(
    evaluate_json: Callable[..., Any], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evaluate_json(stories_gguf, *EXACT)["perplexity"]["value"]
    assert evaluate_json(stories_gguf, *EXACT, "-b", "48", "-ub", "16")["perplexity"][
        "value"
    ] == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(chunk_scorer, "LOGITS_BYTES", 5 * 4 * 512)  # five rows of logits at once
    assert evaluate_json(stories_gguf, *EXACT, "--fresh")["perplexity"]["value"] == pytest.approx(
        expected, rel=1e-5
    )


def test_saved_base_logits_give_the_same_result_within_the_sampling_error(
    evaluate_json: Callable[..., Any],
    llmcli: Llmcli,
    small_gguf: Path,
    stories_gguf: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "base.logits"
    exact = evaluate_json(small_gguf, "--base", stories_gguf, "--save-base", file)
    assert file.stat().st_size < 2.7e3 * exact["positions"]
    with_saved = evaluate_json(small_gguf, "--base-logits", file)
    for name in ("perplexity", "base_perplexity", "perplexity_ratio", "same_top", "rms_delta_p"):
        assert with_saved[name]["value"] == pytest.approx(exact[name]["value"], rel=1e-6), name
    error = with_saved["kl_divergence_sampling_error"]
    assert 0 < error < 0.02 * exact["kl_divergence"]["value"]
    assert with_saved["kl_divergence"]["value"] == pytest.approx(
        exact["kl_divergence"]["value"], abs=5 * error + 1e-5
    )
    done = llmcli("eval", str(small_gguf), "--base", str(file), "-t", "1", "--json")
    assert json.loads(done.out)["kl_divergence"] == with_saved["kl_divergence"]
    second_file = tmp_path / "alone.logits"
    evaluate_json(stories_gguf, "--save-base", second_file)
    assert (
        evaluate_json(small_gguf, "--base-logits", second_file)["kl_divergence"]
        == with_saved["kl_divergence"]
    )
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    assert "was not finished" in llmcli("eval", str(small_gguf), "--base-logits", str(file)).err


def test_saving_base_logits_resumes_after_a_kill(
    evaluate_json: Callable[..., Any], stories_gguf: Path, tmp_path: Path, home: Path
) -> None:
    file, words = tmp_path / "base.logits", (stories_gguf, "-b", "128")
    evaluate_json(*words, "--save-base", file)
    raw = file.read_bytes()
    file.unlink()
    file.with_name("base.logits.part").write_bytes(raw[: len(raw) // 2])
    resumed = evaluate_json(*words, "--save-base", file)
    assert 0 < resumed["resumed_chunks"] < resumed["chunks"]
    assert file.read_bytes() == raw
    assert evaluate_json(*words, "--save-base", file)["resumed_chunks"] == resumed["chunks"]


def test_the_printed_result_is_a_table(
    llmcli: Llmcli, small_gguf: Path, stories_gguf: Path, text: Path
) -> None:
    base = ("--base", str(stories_gguf), "-t", "1")
    done = llmcli(
        "eval", str(small_gguf), *base, "--text", str(text), "--ctx", "64", "--chunks", "4"
    )
    assert done.code == 0
    for words in (
        "against stories260K-F32.gguf",
        "mean KL divergence",
        "same top",
        "99.9 %",
        "4 chunks of 64 tokens",
    ):
        assert words in done.out


def test_the_bundled_text_is_the_default(llmcli: Llmcli, stories_gguf: Path) -> None:
    done = llmcli("eval", str(stories_gguf), "--chunks", "1", "-t", "1", "--json")
    document = json.loads(done.out)
    assert (document["chunks"], document["n_ctx"], document["positions"]) == (
        1,
        512,
        255,
    )
    assert document["text_tokens"] > 100_000


def test_a_base_with_another_vocabulary_is_an_error_that_names_a_token(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    other = tiny_gguf.llama(tmp_path / "other.gguf", hidden=64, ff=64, layers=1, vocab=512)
    done = llmcli("eval", str(stories_gguf), "--base", str(other), "--text", str(text))
    assert (done.code, done.out) == (1, "")
    assert "other.gguf cannot be the base of stories260K-F32.gguf" in done.err
    assert "token " in done.err


def test_a_base_is_quantized_if_its_name_has_a_type(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, text: Path
) -> None:
    words = ("eval", str(stories_gguf), "--text", str(text), "--ctx", "64", "--chunks", "1")
    refused = llmcli(*words, "--base", str(stories))
    assert f"or --base {stories}:Q8_0\n" in refused.err
    done = llmcli(*words, "--base", f"{stories}:Q8_0", "-t", "1")
    assert done.code == 0, done.err
    assert "Q8_0.gguf" in done.out


def test_nan_weights_are_an_error(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    path = tiny_gguf.llama(tmp_path / "nan.gguf", hidden=64, ff=64, layers=1)
    norm = next(
        tensor
        for tensor in read_header.read_header(path).tensors
        if tensor.name == "output_norm.weight"
    )
    raw = bytearray(path.read_bytes())
    raw[norm.offset : norm.offset + norm.nbytes] = np.full(64, np.nan, np.float32).tobytes()
    path.write_bytes(raw)
    done = llmcli("eval", str(path), "--text", str(text), "--ctx", "64", "-t", "1")
    assert done.code == 1
    assert "the model produced logits that are NaN or infinite in chunk 1" in done.err


def test_invalid_arguments_are_an_error(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    not_utf8, short = tmp_path / "odd.txt", tmp_path / "short.txt"
    not_utf8.write_bytes(b"text \xff")
    short.write_text("Once upon a time")
    model = str(stories_gguf)
    for words, code, message in (
        ((model, "--text", str(not_utf8)), 1, "not UTF-8 text: byte 5 is 0xff"),
        ((model, "--text", str(short)), 1, "chunks of 512 need at least 1024 tokens, it has"),
        ((model, "--text", str(tmp_path / "none.txt")), 1, "cannot read"),
        ((model, "--text", str(text), "--ctx", "4"), 1, "--ctx is 4"),
        ((model, "--text", str(text), "-ctk", "q9"), 1, "unknown KV cache type"),
        ((model, "--base", str(stories)), 1, "a base must be a GGUF"),
        ((model, "--base-logits", model), 1, "contains no base logits"),
        ((model, "--base-logits", str(tmp_path / "none")), 1, "there is no file"),
        (
            (model, "--base-logits", model, "--base", model),
            2,
            "--base cannot be combined with saved base logits",
        ),
        ((model, "--chunks", "0"), 2, "--chunks"),
    ):
        done = llmcli("eval", *words)
        assert (done.code, done.out) == (code, ""), words
        assert message in done.err, words
    tiny_model = tiny_gguf.llama(tmp_path / "t.gguf", hidden=64, ff=64, layers=1)
    done = llmcli(
        "eval", str(tiny_model), "--ctx", "128", "--text", str(text), "--chunks", "1", "-t", "1"
    )
    assert done.code == 0
    assert "the 64 tokens this model was trained on" in done.err
