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
    """About 900 of the model's tokens."""
    whole = (resources.files("quant") / "texts" / "evaluation.txt").read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(whole[:1600] + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def small(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in Q4_0."""
    out = tmp_path_factory.mktemp("small") / "stories260K-Q4_0.gguf"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(stories), "Q4_0"), out, threads=1
    )
    return out


@pytest.fixture
def told(llmcli: Llmcli, text: Path) -> Callable[..., dict[str, Any]]:
    """The document of one evaluation in chunks of 64."""

    def call(*words: str | Path) -> dict[str, Any]:
        own = () if "--base-logits" in words else ("--text", str(text), "--ctx", "64")
        done = llmcli("eval", *map(str, words), *own, "-t", "1", "--json")
        assert done.code == 0, done.err
        document = json.loads(done.out)
        document.pop("elapsed_ms")
        return document

    return call


def test_perplexity_is_that_of_transformers(
    told: Callable[..., Any], stories: Path, stories_gguf: Path, text: Path
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
    found = told(stories_gguf, *EXACT)
    assert (found["chunks"], found["positions"]) == (len(chunks), len(nll))
    assert found["perplexity"]["value"] == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    error = float(nll.mean().exp() * nll.std(unbiased=True) / len(nll) ** 0.5)
    assert found["perplexity"]["error"] == pytest.approx(error, rel=1e-3)


def test_a_file_beside_what_it_was_made_of(
    told: Callable[..., Any], small: Path, stories_gguf: Path
) -> None:
    found = told(small, "--base", stories_gguf)
    alone = told(stories_gguf)
    assert found["base_perplexity"]["value"] == pytest.approx(
        alone["perplexity"]["value"], rel=1e-9
    )
    assert found["perplexity_ratio"]["value"] == pytest.approx(
        found["perplexity"]["value"] / found["base_perplexity"]["value"]
    )
    assert 0.001 < found["kl_divergence"]["value"] < 0.5
    assert 0.5 < found["same_top"]["value"] < 1
    same = told(stories_gguf, "--base", stories_gguf)
    assert same["kl_divergence"]["maximum"] < 1e-6
    assert same["same_top"] == {"value": 1, "error": 0}


def test_a_cache_type_can_be_judged(told: Callable[..., Any], stories_gguf: Path) -> None:
    keys = told(stories_gguf, "--base", stories_gguf, "-ctk", "bf16")
    both = told(stories_gguf, "--base", stories_gguf, "-ctk", "bf16", "-ctv", "bf16")
    assert (keys["type_k"], keys["type_v"]) == ("bf16", "f16")
    assert 1e-6 < keys["kl_divergence"]["value"] < both["kl_divergence"]["value"]


def test_what_was_killed_goes_on_and_ends_as_if_it_had_not(
    llmcli: Llmcli,
    told: Callable[..., Any],
    small: Path,
    stories_gguf: Path,
    text: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (small, "--base", stories_gguf, "-b", "128")  # two chunks a pass
    whole = told(*words)
    (journal,) = (home / "cache" / "evaluations").glob("*.records")
    raw = journal.read_bytes()
    assert told(*words, "--fresh")["resumed_chunks"] == 0
    assert journal.read_bytes() == raw
    journal.write_bytes(raw[: len(raw) * 2 // 3])  # as a kill in the middle of a write leaves it
    rest = told(*words)
    assert 0 < rest.pop("resumed_chunks") < whole["chunks"]
    assert rest == {key: value for key, value in whole.items() if key != "resumed_chunks"}

    put, count = RecordLog.append, 0

    def interrupted(self: RecordLog, records: dict[int, bytes]) -> None:
        nonlocal count
        put(self, records)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RecordLog, "append", interrupted)
    again = ("eval", *map(str, words), "--text", str(text), "--ctx", "64", "-t", "1", "--fresh")
    assert llmcli(*again).code == 130
    monkeypatch.setattr(RecordLog, "append", put)
    assert told(*words)["resumed_chunks"] == 6


def test_a_small_edit_of_the_file_begins_anew(
    told: Callable[..., Any], small: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copy2(small, tmp_path / "own.gguf"))
    before = told(own, "--save-base", tmp_path / "base")
    assert told(own)["resumed_chunks"] == before["chunks"]
    tensor = next(
        one for one in read_header.read_header(own).tensors if one.name == "blk.0.ffn_down.weight"
    )
    with own.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float16(8).tobytes())  # the scale of its first block
    after = told(own, "--save-base", tmp_path / "base")
    assert after["resumed_chunks"] == 0
    assert after["perplexity"]["value"] != before["perplexity"]["value"]
    assert told(own, "--base-logits", tmp_path / "base")["kl_divergence"]["value"] < 1e-4


def test_a_small_edit_of_the_base_begins_anew_with_its_kept_logits(
    told: Callable[..., Any], small: Path, stories_gguf: Path, tmp_path: Path
) -> None:
    base, file = Path(shutil.copy2(small, tmp_path / "own.gguf")), tmp_path / "base"
    told(base, "--save-base", file)
    before = told(stories_gguf, "--base-logits", file)
    assert told(stories_gguf, "--base-logits", file)["resumed_chunks"] == before["chunks"]
    tensor = next(
        one for one in read_header.read_header(base).tensors if one.name == "blk.0.ffn_down.weight"
    )
    with base.open("r+b") as stream:
        stream.seek(tensor.offset)
        stream.write(np.float16(8).tobytes())
    told(base, "--save-base", file)
    after = told(stories_gguf, "--base-logits", file)
    assert after["resumed_chunks"] == 0
    assert after["kl_divergence"]["value"] != before["kl_divergence"]["value"]


def test_another_rotation_of_the_cache_begins_anew(
    told: Callable[..., Any], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (stories_gguf, "-ctk", "bf16")
    assert told(*words)["resumed_chunks"] == 0
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert told(*words)["resumed_chunks"] == 0
    monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE")
    assert told(*words)["resumed_chunks"] > 0


def test_other_settings_begin_anew_and_more_chunks_go_on(
    llmcli: Llmcli, stories_gguf: Path, text: Path
) -> None:
    words = ("eval", str(stories_gguf), "--text", str(text), "-t", "1")
    assert "starting again" not in llmcli(*words, "--ctx", "64", "--chunks", "2").err
    assert (
        "2 of 3 chunks were computed before" in llmcli(*words, "--ctx", "64", "--chunks", "3").err
    )
    other = llmcli(*words, "--ctx", "32", "-ctk", "bf16")
    assert (
        "starting again: the last evaluation of this model had other values of: --ctx, -ctk"
        in other.err
    )
    assert "computed before" not in other.err


def test_one_after_the_other_gives_the_same(
    told: Callable[..., Any], small: Path, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (small, "--base", stories_gguf, "-b", "128")
    whole = told(*words)
    monkeypatch.setattr(evaluate, "both_fit", lambda model, base: False)
    with monkeypatch.context() as patch:
        patch.setattr(models, "MAX_BUFFERED_BYTES", 3 * 4 * 512 * 31 * 2)  # three groups at a turn
        assert told(*words, "--fresh") == whole
    opened, turns = models.open_scorers, 0

    def counted(*given: Any) -> Any:
        nonlocal turns
        turns += 1
        return opened(*given)

    monkeypatch.setattr(models, "open_scorers", counted)
    monkeypatch.setattr(
        models.host, "available_memory", lambda: 2 * 4 * 512 * 31 * 2
    )  # half of it: one group
    assert told(*words, "--fresh") == whole
    assert turns == 2 * -(-whole["chunks"] // 2)


def test_blocks_and_batches_change_nothing_but_the_last_digits(
    told: Callable[..., Any], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = told(stories_gguf, *EXACT)["perplexity"]["value"]
    assert told(stories_gguf, *EXACT, "-b", "48", "-ub", "16")["perplexity"][
        "value"
    ] == pytest.approx(whole, rel=1e-5)
    monkeypatch.setattr(chunk_scorer, "LOGITS_BYTES", 5 * 4 * 512)  # five rows of logits at once
    assert told(stories_gguf, *EXACT, "--fresh")["perplexity"]["value"] == pytest.approx(
        whole, rel=1e-5
    )


def test_kept_base_logits_tell_the_same_within_their_error(
    told: Callable[..., Any], llmcli: Llmcli, small: Path, stories_gguf: Path, tmp_path: Path
) -> None:
    file = tmp_path / "base.logits"
    exact = told(small, "--base", stories_gguf, "--save-base", file)
    assert file.stat().st_size < 2.7e3 * exact["positions"]
    kept = told(small, "--base-logits", file)
    for name in ("perplexity", "base_perplexity", "perplexity_ratio", "same_top", "rms_delta_p"):
        assert kept[name]["value"] == pytest.approx(exact[name]["value"], rel=1e-6), name
    error = kept["kl_divergence_sampling_error"]
    assert 0 < error < 0.02 * exact["kl_divergence"]["value"]
    assert kept["kl_divergence"]["value"] == pytest.approx(
        exact["kl_divergence"]["value"], abs=5 * error + 1e-5
    )
    recognised = llmcli("eval", str(small), "--base", str(file), "-t", "1", "--json")
    assert json.loads(recognised.out)["kl_divergence"] == kept["kl_divergence"]
    other = tmp_path / "alone.logits"
    told(stories_gguf, "--save-base", other)
    assert told(small, "--base-logits", other)["kl_divergence"] == kept["kl_divergence"]
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    assert "was not finished" in llmcli("eval", str(small), "--base-logits", str(file)).err


def test_saving_goes_on_where_it_was_killed(
    told: Callable[..., Any], stories_gguf: Path, tmp_path: Path, home: Path
) -> None:
    file, words = tmp_path / "base.logits", (stories_gguf, "-b", "128")
    told(*words, "--save-base", file)
    raw = file.read_bytes()
    file.unlink()
    file.with_name("base.logits.part").write_bytes(raw[: len(raw) // 2])
    found = told(*words, "--save-base", file)
    assert 0 < found["resumed_chunks"] < found["chunks"]
    assert file.read_bytes() == raw
    assert told(*words, "--save-base", file)["resumed_chunks"] == found["chunks"]


def test_people_get_a_table(llmcli: Llmcli, small: Path, stories_gguf: Path, text: Path) -> None:
    base = ("--base", str(stories_gguf), "-t", "1")
    done = llmcli("eval", str(small), *base, "--text", str(text), "--ctx", "64", "--chunks", "4")
    assert done.code == 0
    for words in (
        "against stories260K-F32.gguf",
        "mean KL divergence",
        "same top",
        "99.9 %",
        "4 chunks of 64 tokens",
    ):
        assert words in done.out


def test_the_text_that_ships_is_read_where_none_is_named(
    llmcli: Llmcli, stories_gguf: Path
) -> None:
    done = llmcli("eval", str(stories_gguf), "--chunks", "1", "-t", "1", "--json")
    told = json.loads(done.out)
    assert (told["chunks"], told["n_ctx"], told["positions"]) == (1, 512, 255)
    assert told["text_tokens"] > 100_000


def test_another_vocabulary_is_refused_by_the_token(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    other = tiny_gguf.llama(tmp_path / "other.gguf", hidden=64, ff=64, layers=1, vocab=512)
    done = llmcli("eval", str(stories_gguf), "--base", str(other), "--text", str(text))
    assert (done.code, done.out) == (1, "")
    assert "other.gguf cannot be the base of stories260K-F32.gguf" in done.err
    assert "token " in done.err


def test_a_model_of_nan_is_told_in_words(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
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


def test_mistakes_are_one_line(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    odd, short = tmp_path / "odd.txt", tmp_path / "short.txt"
    odd.write_bytes(b"text \xff")
    short.write_text("Once upon a time")
    model = str(stories_gguf)
    for words, code, why in (
        ((model, "--text", str(odd)), 1, "not UTF-8 text: byte 5 is 0xff"),
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
        assert why in done.err, words
    tiny_one = tiny_gguf.llama(tmp_path / "t.gguf", hidden=64, ff=64, layers=1)
    beyond = llmcli(
        "eval", str(tiny_one), "--ctx", "128", "--text", str(text), "--chunks", "1", "-t", "1"
    )
    assert beyond.code == 0
    assert "the 64 tokens this model was trained on" in beyond.err
