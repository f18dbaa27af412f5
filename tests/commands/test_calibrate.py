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

from llmcli.ui import UI
from llmcli.workflows.evaluation.text import read_evaluation_text
from quant.calibration import imatrix, moments
from quant.calibration.attention_moments import QUERY_STEP
from quant.model_file import read_header
from quant.quantize import write
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 400 of the tiny models' tokens: nearly a byte each."""
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(
        "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 6, encoding="utf-8"
    )
    return path


def means(path: Path, name: str) -> Any:
    entry = imatrix.load_imatrix(path).entries[name]
    return entry.mean_squares(0, 1, entry.count)[0]


def test_sums_are_those_of_transformers_own_activations(
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
    told = json.loads(done.out)
    with open_model(stories_gguf, vocab_only=True) as vocabulary:
        ids = vocabulary.tokenize(
            text.read_text().removesuffix("\n"), special=False, add_special=True
        )
        bos = vocabulary.bos
    chunks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    chunks[:, 0] = bos
    assert (told["chunks"], told["tokens"]) == (len(chunks), chunks.numel())
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    layers = model.model.layers
    seen: dict[str, Any] = {}
    for name, module in {
        "blk.0.attn_q.weight": layers[0].self_attn.q_proj,
        "blk.2.attn_v.weight": layers[2].self_attn.v_proj,
        "blk.4.attn_output.weight": layers[4].self_attn.o_proj,
        "blk.4.ffn_up.weight": layers[4].mlp.up_proj,
        "blk.4.ffn_down.weight": layers[4].mlp.down_proj,
        "token_embd.weight": model.lm_head,
    }.items():
        module.register_forward_hook(
            lambda _, entered, __, name=name: seen.update({name: entered[0].double()})
        )
    with torch.inference_mode():
        model(chunks)
    for name, entered in seen.items():
        want = entered.square().mean((0, 1)).numpy()
        found = means(out, name)
        assert np.linalg.norm(found - want) < 2e-3 * np.linalg.norm(want), name


def test_moments_of_values_are_of_what_transformers_attention_mixes(
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
    entered: list[Any] = []
    model.model.layers[2].self_attn.v_proj.register_forward_hook(
        lambda _, rows, __: entered.append(rows[0])
    )
    with torch.inference_mode():
        shares = model(chunks, output_attentions=True).attentions[2]
    shares = shares[:, :, QUERY_STEP - 1 :: QUERY_STEP]  # [chunks, heads, every other query, keys]
    mixed = (shares.double() @ entered[0].double()[:, None]).flatten(0, 2).numpy()
    second = moments.load_moments(out).input_of("blk.2.attn_v.weight")
    assert second is not None
    assert (second.mixed, second.names) == (True, ("blk.2.attn_v.weight",))
    assert second.counts == (len(mixed),)
    want = mixed.T @ mixed
    assert np.linalg.norm(second.sums() - want) < 2e-3 * np.linalg.norm(want)
    assert np.linalg.norm(second.first_mean() - mixed.mean(0)) < 2e-3 * np.linalg.norm(
        mixed.mean(0)
    )


def test_llama_s_own_names_counts_and_keys(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
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
    found = imatrix.load_imatrix(out)
    assert (found.chunks, found.dataset) == (3, str(text))
    matrices = {
        tensor.name for tensor in read_header.read_header(model).tensors if len(tensor.shape) > 1
    }
    assert set(found.entries) == matrices - {"token_embd.weight"}
    assert {entry.divisors for entry in found.entries.values()} == {(96.0,)}
    assert np.array_equal(means(out, "blk.0.attn_q.weight"), means(out, "blk.0.attn_k.weight"))
    raw = out.read_bytes()
    assert llmcli(*words).code == 0
    assert out.read_bytes() == raw


def test_each_expert_has_sums_of_its_own(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
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
    each = up.mean_squares(0, 4, 64)
    # Every token goes to two experts: their sums together are twice those of the router, which sees
    # the same rows.
    assert np.allclose(share @ each, router.mean_squares(0, 1, 64)[0], rtol=1e-5)


def test_quantize_takes_it(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=256, ff=256, layers=1, tied=True)
    out = tmp_path / "stats.gguf"
    assert (
        llmcli(
            "calibrate", str(model), "-o", str(out), "--text", str(text), "--ctx", "32", "-t", "1"
        ).code
        == 0
    )
    small = tmp_path / "small.gguf"
    done = llmcli("quantize", str(model), "--q2_k", "--imatrix", str(out), "-o", str(small))
    assert done.code == 0, done.err
    assert "has no data for" not in done.err  # of the tied head too
    assert read_header.read_header(small).metadata["quantize.imatrix.entries_count"] == 8


def test_mistakes_are_one_line(llmcli: Llmcli, tmp_path: Path, text: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    shipped, out = tmp_path / "plays.txt", tmp_path / "stats.gguf"
    shipped.write_text(read_evaluation_text(None).content, encoding="utf-8")
    norm = next(
        one
        for one in read_header.read_header(model).tensors
        if one.name == "blk.0.attn_norm.weight"
    )
    raw = bytearray(model.read_bytes())
    raw[norm.offset : norm.offset + 4] = np.float32(np.nan).tobytes()
    (broken := tmp_path / "nan.gguf").write_bytes(raw)
    for words, why in (
        ((str(model), "--text", str(shipped)), "it cannot be used for calibration"),
        ((str(model), "--text", str(text)), "chunks of 512 need at least 1024 tokens, it has"),
        ((str(broken), "--text", str(text), "--ctx", "32"), "the input of blk.0.attn_"),
        (
            (str(broken), "--text", str(text), "--ctx", "32", "--moments", str(out) + "2"),
            "the input of blk.0.attn_",
        ),
    ):
        done = llmcli("calibrate", *words, "-o", str(out), "-t", "1")
        assert (done.code, done.out) == (1, ""), words
        assert why in done.err
        assert not out.exists()


def test_moments_are_numpys_own_of_the_rows_that_entered(
    llmcli: Llmcli, tmp_path: Path, text: Path
) -> None:
    from llmcli.runtime.binding.context_options import ContextOptions
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.scoring.activations import open_activations

    model = tiny_gguf.llama(tmp_path / "moe.gguf", hidden=64, ff=96, layers=2, experts=4)
    out, second = tmp_path / "stats.gguf", tmp_path / "moments.gguf"
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
    done = llmcli(*words, "--moments", str(second))
    assert done.code == 0, done.err
    assert "second moments of the 13 inputs of 17 weights" in done.err
    assert "one pass over the text" in done.err
    found = moments.load_moments(second)
    kept: dict[str, list[Any]] = {}
    with open_model(model, gpu_layers=0) as opened:
        ids = opened.tokenize(text.read_text(), special=False, add_special=True)[:128]

        def sink(seen: Any) -> None:
            rows = (
                seen.rows.copy()
                if seen.experts is None
                else (seen.rows.copy(), seen.experts.copy())
            )
            kept.setdefault(seen.name, []).append(rows)

        with open_activations(
            opened, ContextOptions(32, flash_attn="off"), found.names.__contains__, sink
        ) as activations:
            for start in range(0, 128, 32):
                activations.read(np.array(ids[start : start + 32], np.int32))
    assert found.names == kept.keys()
    assert "blk.1.ffn_down_exps.weight" in found.names
    for name, shown in kept.items():
        one = found.input_of(name)
        assert one is not None
        assert one.mixed == ("attn_v" in name)
        if one.mixed:
            continue
        for matrix in range(one.matrices):
            x = np.concatenate([_entered(rows, matrix) for rows in shown]).astype(np.float64)
            assert one.counts[matrix] == len(x)
            if len(x):
                apart = np.linalg.norm(one.sums(matrix) - x.T @ x)
                assert apart < 1e-5 * np.linalg.norm(x.T @ x), name
    # The sums of squares beside them are the same measurement: the imatrix does not depend on
    # --moments.
    entries = imatrix.load_imatrix(out).entries
    for name in found.names:
        if "attn_v" not in name:
            np.testing.assert_allclose(
                found.imatrix.entries[name].sums(), entries[name].sums(), rtol=1e-5
            )
    raw, plain = out.read_bytes(), second.read_bytes()
    assert llmcli(*words).code == 0
    for name, entry in imatrix.load_imatrix(out).entries.items():
        np.testing.assert_allclose(entry.sums(), entries[name].sums(), rtol=1e-3)
    done = llmcli(*words, "--moments", str(second), "--memory", "1M")
    assert done.code == 0, done.err
    assert "4 passes over the text" in done.err
    assert (out.read_bytes(), second.read_bytes()) == (raw, plain)


def _entered(rows: Any, matrix: int) -> Any:
    if not isinstance(rows, tuple):
        return rows[0, 0]
    values, experts = rows
    tokens, slots = np.nonzero(experts == matrix)
    return values[tokens, slots % values.shape[1]]


KILLED = """
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


@pytest.mark.parametrize("second", [False, True])
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    second: bool, llmcli: Llmcli, tmp_path, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=128, ff=160, layers=2)
    whole, broken = tmp_path / "whole.gguf", tmp_path / "broken.gguf"
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
        more = ["--moments", str(out.with_suffix(".moments")), "--memory", "1M"] if second else []
        return ["-o", str(out), *more]

    assert llmcli(*words, *outputs(whole)).code == 0
    left = (
        15 if second else 4
    )  # reads until it is killed; the first of fifteen is the survey, the next eight a pass
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(left), *words, *outputs(broken)], capture_output=True
    )
    assert done.returncode == -9, done.stderr
    assert not broken.exists()
    done = llmcli(*words, *outputs(broken), "--json")
    assert done.code == 0, done.err
    assert "resuming an earlier run" in done.err
    assert json.loads(done.out)["resumed_chunks"] == (
        12 if second else 3
    )  # moments are saved four chunks at a time
    assert broken.read_bytes() == whole.read_bytes()
    if second:
        assert (
            broken.with_suffix(".moments").read_bytes()
            == whole.with_suffix(".moments").read_bytes()
        )
    assert not list(tmp_path.glob(".*"))


def test_a_text_too_short_for_the_width_is_told_with_what_would_do(
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

    def made(*more: str) -> bytes:
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
        assert llmcli(*words, "-t", "1", *more).code == 0
        return out.read_bytes()

    assert made("--seed", "1") == made("--seed", "1")
    assert len({made(), made("--seed", "1"), made("--seed", "2")}) == 3


def test_files_are_merged_into_one_and_kinds_are_not_mixed(
    llmcli: Llmcli, tmp_path: Path, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    a, b, m, out = (tmp_path / name for name in ("a.gguf", "b.gguf", "m.gguf", "out.gguf"))
    common = ("--text", str(text), "--ctx", "32", "-t", "1")
    assert llmcli("calibrate", str(model), "-o", str(a), "--moments", str(m), *common).code == 0
    assert llmcli("calibrate", str(model), "-o", str(b), "--chunks", "2", *common).code == 0
    done = llmcli("calibrate", "--merge", str(a), str(b), "-o", str(out))
    assert done.code == 0, done.err
    one, other, both = (imatrix.load_imatrix(path) for path in (a, b, out))
    assert both.chunks == one.chunks + 2
    for name, entry in both.entries.items():
        assert entry.divisors[0] == one.entries[name].divisors[0] + 64
        want = one.entries[name].sums() + other.entries[name].sums()
        np.testing.assert_allclose(entry.sums(), want, rtol=1e-6)
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
    for words, why in (
        (("--merge", str(a), str(m)), "contains second moments"),
        (("--merge", str(a), "--text", str(text)), "--text cannot be combined with --merge"),
        (("--merge", str(a), str(b), "--memory", "1G"), "--memory cannot be combined with --merge"),
        ((str(model), "--memory", "1G"), "--memory limits the sums of --moments"),
        ((str(model), str(model)), "2 models given"),
    ):
        done = llmcli("calibrate", *words, "-o", str(tmp_path / "none.gguf"))
        assert done.code in (1, 2)
        assert why in done.err
        assert not (tmp_path / "none.gguf").exists()


def test_a_file_of_moments_steers_nothing_of_another_model(
    tmp_path: Path, llmcli: Llmcli, text: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    words = ("--text", str(text), "--ctx", "32", "-t", "1")
    second = tmp_path / "m.gguf"
    assert (
        llmcli(
            "calibrate", str(model), "-o", str(tmp_path / "s"), "--moments", str(second), *words
        ).code
        == 0
    )
    found = moments.load_moments(second)
    assert found.origin.model == write.open_gguf(model).fingerprint
    assert (
        set(
            found.match_tensors([(t.name, t.shape) for t in read_header.read_header(model).tensors])
        )
        == found.names
    )


def test_no_line_of_the_text_that_ships_is_one_that_eval_reads() -> None:
    def lines(text: str) -> set[str]:
        return {
            " ".join(line.split())
            for line in text.splitlines()
            if len(" ".join(line.split())) >= 40
        }

    folder = resources.files("quant") / "texts"
    read = lines((folder / "evaluation.txt").read_text(encoding="utf-8"))
    files = [file for file in (folder / "calibration").iterdir() if file.is_file()]
    assert len(files) > 4
    words = [file.read_text(encoding="utf-8") for file in files]
    talks = json.loads(
        next(text for text, file in zip(words, files, strict=True) if file.name == "talks.json")
    )
    told = "\n".join(content for talk in talks for _, content in talk)
    assert len(read) > 1000
    assert not read & lines("\n".join([*words, told]))
    assert sum(len(text.encode()) for text in words) < 500 << 10


def test_talks_that_ship_are_written_in_the_model_s_template(
    smollm2: Path, llmcli: Llmcli, tmp_path: Path
) -> None:
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.workflows.calibration import texts
    from llmcli.workflows.evaluation.text import prepare_side

    subject = prepare_side(smollm2, RunOptions(512, 1, None, 512, 512, "0"), ui := UI(False))
    with open_model(smollm2, vocab_only=True) as model:
        *plain, talks = texts.builtin_texts(subject, model, ui)
        assert talks.content.startswith(
            "<|im_start|>system\nYou are a helpful assistant. Answer briefly"
        )
        assert talks.content.count("<|im_start|>assistant\n") > 40
        assert talks.parses_special
        assert not any(text.parses_special for text in plain)
        turns = model.tokenize("<|im_start|>", special=True)
        assert len(turns) == 1
    chosen, names = texts.calibration_chunks(subject, [], 3, None, ui)
    assert (chosen.ids.shape, names) == ((3, 512), (texts.BUILTIN_NAME,))
    every, _ = texts.calibration_chunks(subject, [], None, None, ui)
    assert 60_000 < every.ids.size < 130_000
    assert (every.ids == turns[0]).sum() > 80
    assert (every.ids[:3] == chosen.ids).all()


def test_a_small_disk_is_told_before_anything_is_read(
    llmcli: Llmcli, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=64, layers=1)
    out, second = tmp_path / "stats.gguf", tmp_path / "moments.gguf"
    words = (
        "calibrate",
        str(model),
        "-o",
        str(out),
        "--moments",
        str(second),
        "--text",
        str(text),
        "--ctx",
        "32",
    )
    for free, code, why in (
        (1000, 1, "has 1,000 bytes free, the moments need"),
        (110_000, 0, "left to save an unfinished pass: if interrupted, the pass starts again"),
    ):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: Usage(free))
        done = llmcli(*words, "-t", "1")
        assert done.code == code, done.err
        assert why in done.err
        assert second.exists() == (code == 0)


@dataclass(frozen=True)
class Usage:
    free: int
