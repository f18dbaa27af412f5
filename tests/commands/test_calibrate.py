"""`llmcli calibrate`: sums and moments against transformers and numpy, resuming, merging and
errors.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.ui import UI
from llmcli.workflows.evaluation.text import read_evaluation_text
from quant.calibration import imatrix, moments
from quant.calibration.attention_moments import QUERY_STEP
from quant.convert import checkpoint_source
from quant.model_file import read_header
from quant.quantize import plan, write
from tests.fixtures.cli import Done
from tests.quant import predicting_checkpoint, tiny_checkpoint, tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 400 tokens for the tiny models, whose tokens are nearly one byte each."""
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(
        "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 6, encoding="utf-8"
    )
    return path


def mean_squares(path: Path, name: str) -> Any:
    """Return the mean square of each column of this weight's input, read from an imatrix file."""
    entry = imatrix.load_imatrix(path).entries[name]
    return entry.mean_squares(0, 1, entry.count)[0]


def test_sums_equal_those_of_the_activations_of_transformers(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, text: Path, tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from llmcli.runtime.binding.model import open_model

    out = tmp_path / "stats.gguf"
    done = llmcli(
        "calibrate",
        str(stories_gguf),
        "-o",
        str(out),
        "--text",
        str(text),
        "--ctx",
        "64",
        "-t",
        "1",
        "--json",
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    with open_model(stories_gguf, vocab_only=True) as vocabulary:
        ids = vocabulary.tokenize(
            text.read_text().removesuffix("\n"), special=False, add_special=True
        )
        bos = vocabulary.bos
    chunks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    chunks[:, 0] = bos
    assert (document["chunks"], document["tokens"]) == (len(chunks), chunks.numel())
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    layers = model.model.layers
    inputs: dict[str, Any] = {}
    for name, module in {
        "blk.0.attn_q.weight": layers[0].self_attn.q_proj,
        "blk.2.attn_v.weight": layers[2].self_attn.v_proj,
        "blk.4.attn_output.weight": layers[4].self_attn.o_proj,
        "blk.4.ffn_up.weight": layers[4].mlp.up_proj,
        "blk.4.ffn_down.weight": layers[4].mlp.down_proj,
        "token_embd.weight": model.lm_head,
    }.items():
        module.register_forward_hook(
            lambda _, args, __, name=name: inputs.update({name: args[0].double()})
        )
    with torch.inference_mode():
        model(chunks)
    for name, rows in inputs.items():
        expected = rows.square().mean((0, 1)).numpy()
        actual = mean_squares(out, name)
        assert np.linalg.norm(actual - expected) < 2e-3 * np.linalg.norm(expected), name


def test_moments_of_attention_values_equal_those_of_transformers(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, text: Path, tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from llmcli.runtime.binding.model import open_model

    out = tmp_path / "moments.gguf"
    words = (
        "calibrate",
        str(stories_gguf),
        "-o",
        str(tmp_path / "stats.gguf"),
        "--moments",
        str(out),
    )
    done = llmcli(*words, "--text", str(text), "--ctx", "64", "-t", "1", "--ubatch-size", "24")
    assert done.code == 0, done.err
    with open_model(stories_gguf, vocab_only=True) as vocabulary:
        ids = vocabulary.tokenize(
            text.read_text().removesuffix("\n"), special=False, add_special=True
        )
        bos = vocabulary.bos
    chunks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    chunks[:, 0] = bos
    model = transformers.AutoModelForCausalLM.from_pretrained(
        stories, dtype=torch.float32, attn_implementation="eager"
    )
    inputs: list[Any] = []
    model.model.layers[2].self_attn.v_proj.register_forward_hook(
        lambda _, args, __: inputs.append(args[0])
    )
    with torch.inference_mode():
        weights = model(chunks, output_attentions=True).attentions[2]
    # [chunks, heads, every QUERY_STEP-th query, keys]
    weights = weights[:, :, QUERY_STEP - 1 :: QUERY_STEP]
    mixed = (weights.double() @ inputs[0].double()[:, None]).flatten(0, 2).numpy()
    actual = moments.load_moments(out).input_of("blk.2.attn_v.weight")
    assert actual is not None
    assert (actual.mixed, actual.names) == (True, ("blk.2.attn_v.weight",))
    assert actual.counts == (len(mixed),)
    expected = mixed.T @ mixed
    assert np.linalg.norm(actual.sums() - expected) < 2e-3 * np.linalg.norm(expected)
    assert np.linalg.norm(actual.first_mean() - mixed.mean(0)) < 2e-3 * np.linalg.norm(
        mixed.mean(0)
    )


def test_the_imatrix_has_the_names_counts_and_keys_of_llama_imatrix(
    llmcli: Llmcli, tmp_path: Path, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=2)
    out = tmp_path / "stats.gguf"
    words = (
        "calibrate",
        str(model),
        "-o",
        str(out),
        "--text",
        str(text),
        "--ctx",
        "32",
        "--chunks",
        "3",
        "-t",
        "1",
    )
    done = llmcli(*words)
    assert done.code == 0, done.err
    assert "15 tensors over 96 tokens in 3 chunks of 32" in done.out
    statistics = imatrix.load_imatrix(out)
    assert (statistics.chunks, statistics.dataset) == (3, str(text))
    matrices = {
        tensor.name for tensor in read_header.read_header(model).tensors if len(tensor.shape) > 1
    }
    assert set(statistics.entries) == matrices - {"token_embd.weight"}
    assert {entry.divisors for entry in statistics.entries.values()} == {(96.0,)}
    assert np.array_equal(
        mean_squares(out, "blk.0.attn_q.weight"), mean_squares(out, "blk.0.attn_k.weight")
    )
    raw = out.read_bytes()
    assert llmcli(*words).code == 0
    assert out.read_bytes() == raw


def test_each_expert_has_its_own_sums(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "moe.gguf", hidden=64, ff=96, layers=1, experts=4)
    out = tmp_path / "stats.gguf"
    done = llmcli(
        "calibrate", str(model), "-o", str(out), "--text", str(text), "--ctx", "32", "-t", "1"
    )
    assert done.code == 0, done.err
    entries = imatrix.load_imatrix(out).entries
    up, gate, router = (
        entries[f"blk.0.{role}.weight"] for role in ("ffn_up_exps", "ffn_gate_exps", "ffn_gate_inp")
    )
    (tokens,) = router.divisors
    assert len(up.divisors) == 4
    assert sum(up.divisors) == 2 * tokens
    assert up.divisors == gate.divisors
    share = np.array(up.divisors) / sum(up.divisors)
    per_expert = up.mean_squares(0, 4, 64)
    # Every token goes to two experts, so the sums of all experts are twice those of the router,
    # whose input rows are the same.
    assert np.allclose(share @ per_expert, router.mean_squares(0, 1, 64)[0], rtol=1e-5)


def test_quantize_uses_the_imatrix(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=256, ff=256, layers=1, tied=True)
    out = tmp_path / "stats.gguf"
    assert (
        llmcli(
            "calibrate", str(model), "-o", str(out), "--text", str(text), "--ctx", "32", "-t", "1"
        ).code
        == 0
    )
    quantized_file = tmp_path / "small.gguf"
    done = llmcli(
        "quantize", str(model), "--q2_k", "--imatrix", str(out), "-o", str(quantized_file)
    )
    assert done.code == 0, done.err
    assert "has no data for" not in done.err  # not even for the head, which is the token embedding
    assert read_header.read_header(quantized_file).metadata["quantize.imatrix.entries_count"] == 8


def test_unusable_texts_and_nan_weights_are_errors(
    llmcli: Llmcli, tmp_path: Path, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    evaluation_text, out = tmp_path / "plays.txt", tmp_path / "stats.gguf"
    evaluation_text.write_text(read_evaluation_text(None).content, encoding="utf-8")
    norm = next(
        tensor
        for tensor in read_header.read_header(model).tensors
        if tensor.name == "blk.0.attn_norm.weight"
    )
    raw = bytearray(model.read_bytes())
    raw[norm.offset : norm.offset + 4] = np.float32(np.nan).tobytes()
    (nan_model := tmp_path / "nan.gguf").write_bytes(raw)
    for words, message in (
        ((str(model), "--text", str(evaluation_text)), "it cannot be used for calibration"),
        ((str(model), "--text", str(text)), "chunks of 512 need at least 1024 tokens, it has"),
        ((str(nan_model), "--text", str(text), "--ctx", "32"), "the input of blk.0.attn_"),
        (
            (str(nan_model), "--text", str(text), "--ctx", "32", "--moments", str(out) + "2"),
            "the input of blk.0.attn_",
        ),
    ):
        done = llmcli("calibrate", *words, "-o", str(out), "-t", "1")
        assert (done.code, done.out) == (1, ""), words
        assert message in done.err
        assert not out.exists()


def test_moments_equal_those_that_numpy_computes_from_the_input_rows(
    llmcli: Llmcli, tmp_path: Path, text: Path
) -> None:
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.scoring.activations import open_activations

    model = tiny_gguf.llama(tmp_path / "moe.gguf", hidden=64, ff=96, layers=2, experts=4)
    out, moments_file = tmp_path / "stats.gguf", tmp_path / "moments.gguf"
    words = (
        "calibrate",
        str(model),
        "-o",
        str(out),
        "--text",
        str(text),
        "--ctx",
        "32",
        "--chunks",
        "4",
        "-t",
        "1",
    )
    done = llmcli(*words, "--moments", str(moments_file))
    assert done.code == 0, done.err
    assert "second moments of the 13 inputs of 17 weights" in done.err
    assert "one pass over the text" in done.err
    measured = moments.load_moments(moments_file)
    rows_by_name: dict[str, list[Any]] = {}
    with open_model(model, ON_HOST) as loaded_model:
        ids = loaded_model.tokenize(text.read_text(), special=False, add_special=True)[:128]

        def sink(activation: Any) -> None:
            rows = (
                activation.rows.copy()
                if activation.experts is None
                else (activation.rows.copy(), activation.experts.copy())
            )
            rows_by_name.setdefault(activation.name, []).append(rows)

        with open_activations(
            loaded_model, ContextOptions(32, flash_attn="off"), measured.names.__contains__, sink
        ) as activations:
            for start in range(0, 128, 32):
                activations.read(np.array(ids[start : start + 32], np.int32))
    assert measured.names == rows_by_name.keys()
    assert "blk.1.ffn_down_exps.weight" in measured.names
    for name, batches in rows_by_name.items():
        input_moments = measured.input_of(name)
        assert input_moments is not None
        assert input_moments.mixed == ("attn_v" in name)
        if input_moments.mixed:
            continue
        for matrix in range(input_moments.matrices):
            x = np.concatenate([_input_rows(rows, matrix) for rows in batches]).astype(np.float64)
            assert input_moments.counts[matrix] == len(x)
            if len(x):
                difference = np.linalg.norm(input_moments.sums(matrix) - x.T @ x)
                assert difference < 1e-5 * np.linalg.norm(x.T @ x), name
    # The sums of squares in the moments file equal those in the imatrix.
    entries = imatrix.load_imatrix(out).entries
    for name in measured.names:
        if "attn_v" not in name:
            np.testing.assert_allclose(
                measured.imatrix.entries[name].sums(), entries[name].sums(), rtol=1e-5
            )
    imatrix_bytes, moments_bytes = out.read_bytes(), moments_file.read_bytes()
    assert llmcli(*words).code == 0
    for name, entry in imatrix.load_imatrix(out).entries.items():
        np.testing.assert_allclose(entry.sums(), entries[name].sums(), rtol=1e-3)
    done = llmcli(*words, "--moments", str(moments_file), "--memory", "1M")
    assert done.code == 0, done.err
    assert "4 passes over the text" in done.err
    assert (out.read_bytes(), moments_file.read_bytes()) == (imatrix_bytes, moments_bytes)


def _input_rows(rows: Any, matrix: int) -> Any:
    """Return the input rows of one matrix: all rows, or those of the tokens sent to that expert."""
    if not isinstance(rows, tuple):
        return rows[0, 0]
    values, experts = rows
    tokens, slots = np.nonzero(experts == matrix)
    return values[tokens, slots % values.shape[1]]


# Runs llmcli, and kills the process at the n-th call of Activations.read; n is the first argument.
KILL_PROGRAM = """
import os, sys
from llmcli.app import main
from llmcli.commands import calibrate
from llmcli.runtime.scoring.activations import Activations
from quant.calibration import resume_file
resume_file.SAVE_SECONDS = resume_file.SAVE_TIME_FACTOR = 0
left, read = int(sys.argv.pop(1)), Activations.read
def count(self, ids):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)
    read(self, ids)
Activations.read = count
main()
"""


@pytest.mark.parametrize("with_moments", [False, True])
def test_a_killed_run_resumes_and_writes_the_same_bytes(
    with_moments: bool, llmcli: Llmcli, tmp_path, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=128, ff=160, layers=2)
    uninterrupted, resumed = tmp_path / "whole.gguf", tmp_path / "broken.gguf"
    words = [
        "calibrate",
        str(model),
        "--text",
        str(text),
        "--ctx",
        "32",
        "-t",
        "1",
        "--chunks",
        "8",
    ]

    def outputs(out: Path) -> list[str]:
        moments_flags = (
            ["--moments", str(out.with_suffix(".moments")), "--memory", "1M"]
            if with_moments
            else []
        )
        return ["-o", str(out), *moments_flags]

    assert llmcli(*words, *outputs(uninterrupted)).code == 0
    # With moments, read 1 finds the inputs of the weights, and reads 2 to 9 are the first pass.
    killed_at = 15 if with_moments else 4
    done = subprocess.run(
        [sys.executable, "-c", KILL_PROGRAM, str(killed_at), *words, *outputs(resumed)],
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr
    assert not resumed.exists()
    done = llmcli(*words, *outputs(resumed), "--json")
    assert done.code == 0, done.err
    assert "resuming an earlier run" in done.err
    # Moments are saved four chunks at a time.
    assert json.loads(done.out)["resumed_chunks"] == (12 if with_moments else 3)
    assert resumed.read_bytes() == uninterrupted.read_bytes()
    if with_moments:
        assert (
            resumed.with_suffix(".moments").read_bytes()
            == uninterrupted.with_suffix(".moments").read_bytes()
        )
    assert not list(tmp_path.glob(".*"))


def test_a_text_too_short_for_full_rank_is_reported_with_the_needed_length(
    llmcli: Llmcli, tmp_path: Path, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=1)
    out = tmp_path / "stats.gguf"
    words = (
        "calibrate",
        str(model),
        "-o",
        str(out),
        "--text",
        str(text),
        "--ctx",
        "32",
        "--chunks",
        "2",
        "-t",
        "1",
    )
    done = llmcli(*words, "--moments", str(tmp_path / "m"), "--json")
    assert done.code == 0, done.err
    assert "blk.0.ffn_down.weight has 96 columns and got 64 rows" in done.err
    assert "about 97 tokens are needed (this text has 64)" in done.err
    assert json.loads(done.out)["rank_deficient"] == {"blk.0.ffn_down.weight": 1}


def test_a_seed_chooses_the_chunks(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)

    def imatrix_bytes(*flags: str) -> bytes:
        out = tmp_path / "stats.gguf"
        words = (
            "calibrate",
            str(model),
            "-o",
            str(out),
            "--text",
            str(text),
            "--ctx",
            "16",
            "--chunks",
            "2",
        )
        assert llmcli(*words, "-t", "1", *flags).code == 0
        return out.read_bytes()

    assert imatrix_bytes("--seed", "1") == imatrix_bytes("--seed", "1")
    assert len({imatrix_bytes(), imatrix_bytes("--seed", "1"), imatrix_bytes("--seed", "2")}) == 3


def test_files_of_the_same_kind_are_merged(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    a, b, m, out = (tmp_path / name for name in ("a.gguf", "b.gguf", "m.gguf", "out.gguf"))
    common = ("--text", str(text), "--ctx", "32", "-t", "1")
    assert llmcli("calibrate", str(model), "-o", str(a), "--moments", str(m), *common).code == 0
    assert llmcli("calibrate", str(model), "-o", str(b), "--chunks", "2", *common).code == 0
    done = llmcli("calibrate", "--merge", str(a), str(b), "-o", str(out))
    assert done.code == 0, done.err
    first, second, merged = (imatrix.load_imatrix(path) for path in (a, b, out))
    assert merged.chunks == first.chunks + 2
    for name, entry in merged.entries.items():
        assert entry.divisors[0] == first.entries[name].divisors[0] + 64
        expected = first.entries[name].sums() + second.entries[name].sums()
        np.testing.assert_allclose(entry.sums(), expected, rtol=1e-6)
    assert llmcli("calibrate", "--merge", str(m), str(m), "-o", str(tmp_path / "mm.gguf")).code == 0
    assert (
        moments.load_moments(tmp_path / "mm.gguf").inputs[0].counts[0]
        == 2 * moments.load_moments(m).inputs[0].counts[0]
    )
    assert (
        "is also read, and would be overwritten"
        in llmcli("calibrate", "--merge", str(a), str(b), "-o", str(a)).err
    )
    assert (
        "counts twice"
        in llmcli("calibrate", "--merge", str(a), str(a), "-o", str(tmp_path / "aa.gguf")).err
    )
    for words, message in (
        (("--merge", str(a), str(m)), "contains second moments"),
        (("--merge", str(a), "--text", str(text)), "--text cannot be combined with --merge"),
        (("--merge", str(a), str(b), "--memory", "1G"), "--memory cannot be combined with --merge"),
        ((str(model), "--memory", "1G"), "--memory limits the sums of --moments"),
        ((str(model), str(model)), "2 models given"),
    ):
        done = llmcli("calibrate", *words, "-o", str(tmp_path / "none.gguf"))
        assert done.code in (1, 2)
        assert message in done.err
        assert not (tmp_path / "none.gguf").exists()


def test_a_moments_file_records_its_model_and_matches_its_tensors(
    tmp_path: Path, llmcli: Llmcli, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    words = ("--text", str(text), "--ctx", "32", "-t", "1")
    moments_file = tmp_path / "m.gguf"
    assert (
        llmcli(
            "calibrate",
            str(model),
            "-o",
            str(tmp_path / "s"),
            "--moments",
            str(moments_file),
            *words,
        ).code
        == 0
    )
    measured = moments.load_moments(moments_file)
    assert measured.origin.model == write.open_gguf(model).fingerprint
    assert (
        set(
            measured.match_tensors(
                [(t.name, t.shape) for t in read_header.read_header(model).tensors]
            )
        )
        == measured.names
    )


def test_the_calibration_texts_share_no_line_with_the_evaluation_text() -> None:
    def long_lines(text: str) -> set[str]:
        return {
            " ".join(line.split())
            for line in text.splitlines()
            if len(" ".join(line.split())) >= 40
        }

    folder = resources.files("quant") / "texts"
    evaluation_lines = long_lines((folder / "evaluation.txt").read_text(encoding="utf-8"))
    files = [file for file in (folder / "calibration").iterdir() if file.is_file()]
    assert len(files) > 4
    texts = [file.read_text(encoding="utf-8") for file in files]
    conversations = json.loads(
        next(text for text, file in zip(texts, files, strict=True) if file.name == "talks.json")
    )
    conversation_text = "\n".join(
        content for conversation in conversations for _, content in conversation
    )
    assert len(evaluation_lines) > 1000
    assert not evaluation_lines & long_lines("\n".join([*texts, conversation_text]))
    assert sum(len(text.encode()) for text in texts) < 500 << 10


def test_the_calibration_conversations_use_the_chat_template_of_the_model(
    smollm2: Path, llmcli: Llmcli, tmp_path: Path
) -> None:
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.workflows.calibration import texts
    from llmcli.workflows.evaluation.text import prepare_side

    subject = prepare_side(smollm2, RunOptions(512, 1, None, 512, 512, "0"), ui := UI(False))
    with open_model(smollm2, vocab_only=True) as model:
        *plain_texts, conversations = texts.builtin_texts(subject, model, ui)
        assert conversations.content.startswith(
            "<|im_start|>system\nYou are a helpful assistant. Answer briefly"
        )
        assert conversations.content.count("<|im_start|>assistant\n") > 40
        assert conversations.is_rendered
        assert not any(text.is_rendered for text in plain_texts)
        turn_start = model.tokenize("<|im_start|>", special=True)
        assert len(turn_start) == 1
    chosen, record = texts.calibration_chunks(subject, [], 3, None, ui)
    assert (chosen.ids.shape, record.names) == ((3, 512), (texts.BUILTIN_NAME,))
    assert record.kinds == ("chats", "code", "languages", "mathematics", "prose")
    all_chunks, _ = texts.calibration_chunks(subject, [], None, None, ui)
    assert 60_000 < all_chunks.ids.size < 130_000
    assert (all_chunks.ids == turn_start[0]).sum() > 80
    assert (all_chunks.ids[:3] == chosen.ids).all()


def test_a_full_disk_is_an_error_before_the_text_is_read(
    llmcli: Llmcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    out, moments_file = tmp_path / "stats.gguf", tmp_path / "moments.gguf"
    words = (
        "calibrate",
        str(model),
        "-o",
        str(out),
        "--moments",
        str(moments_file),
        "--text",
        str(text),
        "--ctx",
        "32",
    )
    for free, code, message in (
        (1000, 1, "has 1,000 bytes free, the moments need"),
        (110_000, 0, "left to save an unfinished pass: if interrupted, the pass starts again"),
    ):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: DiskUsage(free))
        done = llmcli(*words, "-t", "1")
        assert done.code == code, done.err
        assert message in done.err
        assert moments_file.exists() == (code == 0)


@dataclass(frozen=True)
class DiskUsage:
    """The part of the result of `shutil.disk_usage` that llmcli reads."""

    free: int


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM"])
def predicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with a layer that predicts a further token, and its F32 file."""
    pytest.importorskip("torch", reason="torch is not installed: no checkpoint")
    pytest.importorskip("transformers", reason="transformers is not installed: no checkpoint")
    folder = tmp_path_factory.mktemp("predicting")
    predicting_checkpoint.build(request.param, folder / "tiny")
    source = checkpoint_source.open_checkpoint(folder / "tiny")
    write.write_model(plan.plan_quantization(source, "F32"), folder / "m.gguf", threads=1)
    return folder


def expected_projection_input(folder: Path, text: Path, n_ctx: int) -> np.ndarray:
    """Return the mean squares of what enters the projection of the prediction layer: the norms of
    the next token's embedding and of the state after the final norm of transformers' model.
    """
    import torch
    import transformers

    from llmcli.runtime.binding.model import open_model

    with open_model(folder / "m.gguf", vocab_only=True) as vocabulary:
        ids = vocabulary.tokenize(
            text.read_text().removesuffix("\n"), special=False, add_special=True
        )
        bos = vocabulary.bos if vocabulary.add_bos else None
    chunks = torch.tensor(ids[: len(ids) // n_ctx * n_ctx]).view(-1, n_ctx)
    if bos is not None:
        chunks[:, 0] = bos
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "tiny", dtype=torch.float32, attn_implementation="eager"
    )
    body = model.model
    states: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).detach())

    body.norm.register_forward_hook(keep)
    stored = {
        name: torch.from_numpy(np.array(values))
        for name, values in tiny_checkpoint.read(folder / "tiny" / "model.safetensors").items()
    }
    ahead = f"model.layers.{len(body.layers)}."
    is_qwen = "mtp.fc.weight" in stored
    names = (
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        if is_qwen
        else (ahead + "enorm", ahead + "hnorm")
    )
    norms = []
    for name in names:
        norm = type(body.norm)(len(stored[f"{name}.weight"]), eps=model.config.rms_norm_eps)
        norm.weight.data.copy_(stored[f"{name}.weight"])
        norms.append(norm)
    with torch.no_grad():
        model(chunks)
        state = torch.cat(states).view(len(chunks), n_ctx, -1)[:, :-1]
        embedded = body.embed_tokens(chunks)[:, 1:]
        values = torch.cat([norms[0](embedded), norms[1](state)], -1).double()
    result: np.ndarray = (values**2).mean((0, 1)).numpy()
    return result


def test_layers_that_predict_further_tokens_are_calibrated(
    llmcli: Llmcli, predicting: Path, text: Path, tmp_path: Path
) -> None:
    stats, model = tmp_path / "stats.gguf", predicting / "m.gguf"
    words = ("calibrate", str(model), "--text", str(text), "--ctx", "64", "-t", "1", "-fa", "off")
    assert llmcli(*words, "-o", str(stats)).code == 0
    header = read_header.read_header(model)
    layer = (header.get_int("block_count") or 0) - 1
    entries = imatrix.load_imatrix(stats).entries
    predicted = {name for name in entries if name.startswith(f"blk.{layer}.")}
    matrices = {
        tensor.name
        for tensor in header.tensors
        if tensor.name.startswith(f"blk.{layer}.")
        and len(tensor.shape) > 1
        and not tensor.name.endswith(("embed_tokens.weight", "shared_head_head.weight"))
    }
    assert predicted >= {name for name in matrices if "conv" not in name}
    found = mean_squares(stats, f"blk.{layer}.nextn.eh_proj.weight")
    expected = expected_projection_input(predicting, text, 64)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    # The model's own statistics are those of the model without this layer.
    bare = tmp_path / "bare.gguf"
    done = llmcli(
        "quantize", str(predicting / "tiny"), "--type", "F32", "--no-mtp", "-o", str(bare)
    )
    assert done.code == 0, done.err
    alone = tmp_path / "alone.gguf"
    assert llmcli("calibrate", str(bare), *words[2:], "-o", str(alone)).code == 0
    others = imatrix.load_imatrix(alone).entries
    assert others.keys() == entries.keys() - predicted
    for name in others:
        np.testing.assert_array_equal(mean_squares(alone, name), mean_squares(stats, name))


def test_calibrated_prediction_layers_get_the_types_of_the_recipe(
    llmcli: Llmcli, predicting: Path, text: Path, tmp_path: Path
) -> None:
    stats, moments_file = tmp_path / "stats.gguf", tmp_path / "moments"
    model = str(predicting / "m.gguf")
    words = ("--text", str(text), "--ctx", "64", "-t", "1")
    done = llmcli("calibrate", model, "-o", str(stats), "--moments", str(moments_file), *words)
    assert done.code == 0, done.err
    without, out = tmp_path / "without.gguf", tmp_path / "out.gguf"
    assert llmcli("quantize", model, "--type", "Q4_0", "-o", str(without)).code == 0
    done = llmcli("quantize", model, "--type", "Q4_0", "--imatrix", str(stats), "-o", str(out))
    assert done.code == 0, done.err

    def type_of(path: Path) -> str:
        return next(
            tensor.type
            for tensor in read_header.read_header(path).tensors
            if tensor.name.endswith("nextn.eh_proj.weight")
        )

    assert (type_of(without), type_of(out)) == ("Q8_0", "Q4_0")
    gptq = tmp_path / "gptq.gguf"
    done = llmcli(
        *("quantize", model, "--type", "Q4_0", "--method", "gptq"),
        *("--moments", str(moments_file), "-o", str(gptq)),
    )
    assert done.code == 0, done.err
    assert type_of(gptq) == "Q4_0"
