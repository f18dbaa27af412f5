"""`llmcli run` and `llmcli chat`: input, output, JSON, samples, beams and errors."""

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import tool_server
from tests.fixtures.cli import Done
from tests.fixtures.fakes import answering

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]

NUMBER = (int, float)
SHAPE: dict[str, Any] = {
    "model": {
        "name": str,
        "path": str,
        "file_bytes": int,
        "file_type": str,
        "parameters": int,
        "sha256": str,
    },
    "text": str,
    "finish": str,
    "tokens": [
        {
            "id": int,
            "text": str,
            "ms": NUMBER,
            "decode_ms": NUMBER,
            "sample_ms": NUMBER,
            "logprob": NUMBER,
        }
    ],
    "timing": {
        "load_ms": NUMBER,
        "prompt_tokens": int,
        "cached_tokens": int,
        "prompt_ms": NUMBER,
        "prompt_per_second": NUMBER,
        "ttft_ms": NUMBER,
        "ttfo_ms": NUMBER,
        "thinking_tokens": int,
        "generated_tokens": int,
        "generate_ms": NUMBER,
        "tokens_per_second": NUMBER,
        "tpot_ms": NUMBER,
        "itl_ms": {"p50": NUMBER, "p90": NUMBER, "p95": NUMBER, "p99": NUMBER, "max": NUMBER},
    },
    "kv": {
        "type_k": str,
        "type_v": str,
        "bytes_per_token": int,
        "cells": int,
        "used_cells": int,
        "predicted_bytes": int,
        "allocated_bytes": int,
        "compute_bytes": int,
        "output_bytes": int,
    },
    "seed": int,
    "settings": dict,
    "build": dict,
    "machine": dict,
    "request": {"prompt": str, "flags": dict},
}


def type_errors(shape: Any, value: Any, where: str = "") -> list[str]:
    """Return one message for each value whose type is not the one that `shape` gives.

    `shape` has types in place of values: a dict names the exact keys, and a list has one entry,
    which describes every element.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict) or set(shape) != set(value):
            return [f"{where}: keys {sorted(value)} instead of {sorted(shape)}"]
        return [
            error
            for key in shape
            for error in type_errors(shape[key], value[key], f"{where}.{key}")
        ]
    if isinstance(shape, list):
        return [
            error for element in value for error in type_errors(shape[0], element, f"{where}[]")
        ]
    return (
        [] if isinstance(value, shape) and not isinstance(value, bool) else [f"{where}: {value!r}"]
    )


def parse_strict_json(text: str) -> Any:
    """Parse JSON, and refuse NaN and Infinity, which Python's parser accepts."""

    def reject_constant(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=reject_constant)


def test_run_prints_the_answer_on_stdout_and_the_timing_on_stderr(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"It is Paris.")
    done = llmcli("run", "fake", "Which city?", "--temp", "0")
    assert (done.code, done.out) == (0, "It is Paris.\n")
    assert "tok/s" in done.err
    assert "KV" in done.err


def test_run_reads_the_prompt_from_stdin_an_argument_or_a_file(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    opened = fake(b"yes")
    file = tmp_path / "prompt.txt"
    file.write_text("from afar\n")
    for words, stdin, expected in (
        (["fake"], b"from a pipe\n", "from a pipe"),
        (["fake", "-p", "with p"], b"not this", "with p"),
        (["fake", "-f", str(file)], b"", "from afar"),
        (["-m", "fake", "as a word"], b"", "as a word"),
        (["-hf", "fake", "-p", "pasted"], b"", "pasted"),
        (["fake", "Sum up:"], b"a text\n", "Sum up:"),
        (["fake", "Sum up:", "-f", "-"], b"a text\n", "Sum up:\n\na text"),
        (["fake", "-f", "-"], b"\xef\xbb\xbfone\r\ntwo\n", "one\ntwo"),
        (["fake", "Sum up:", "-f", str(file)], b"not this", "Sum up:\n\nfrom afar"),
    ):
        assert llmcli("run", *words, stdin=stdin).out == "yes\n"
        context_text = bytes(token for token in opened[-1].engine.ledger.tokens[0] if token < 256)
        assert context_text.startswith(f"<user>{expected}\n<assistant>".encode())


def test_escape_sequences_of_a_model_never_reach_the_terminal(llmcli: Llmcli, fake: Fake) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 a\rb\x9bc \u202e\u2066\x7f done"
    fake(evil.encode())
    out = llmcli("run", "fake", "x", "--temp", "0").out
    assert not set(out) & set("\x1b\x07\r\x9b\u202e\u2066\x7f")
    assert out.startswith("␛[2J␛]0;owned␇ a␍b")
    document = llmcli("run", "fake", "x", "--temp", "0", "--json").out
    assert not set(document) & set("\x1b\x07\r\x9b\u202e\u2066\x7f")
    answer = parse_strict_json(document)
    assert answer["text"] == evil  # programs get the exact text


def test_a_flag_overrides_the_alias_which_overrides_the_default(llmcli: Llmcli, fake: Fake) -> None:
    fake(settings={"temp": 0.3, "top_k": 7}, system="Speak Latin.")
    out = llmcli("chat", "fake", "--top-k", "9", stdin=b"/show\n").out
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) > 1}
    assert (rows["temp"], rows["top_k"], rows["top_p"]) == ("0.3", "9", "0.95")
    assert "Speak Latin." in out


def test_a_base_model_continues_the_text_with_a_note(llmcli: Llmcli, fake: Fake) -> None:
    opened = fake(b" there was", template=None)
    done = llmcli("run", "fake", "Once", "--temp", "0")
    assert done.out == " there was\n"
    assert "base model" in done.err
    assert bytes(opened[0].engine.ledger.tokens[0][1:]).startswith(b"Once there")


def test_raw_sends_the_prompt_as_it_is(llmcli: Llmcli, fake: Fake) -> None:
    opened = fake(b"!")
    done = llmcli("run", "fake", "<user>", "--raw", "--temp", "0")
    assert "base model" not in done.err
    assert bytes(opened[0].engine.ledger.tokens[0][1:]).startswith(b"<user>!")


def test_a_stop_text_ends_the_answer_and_is_not_shown(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"one two three")
    done = parse_strict_json(
        llmcli("run", "fake", "x", "--temp", "0", "-r", " two", "-r", "three", "--json").out
    )
    assert (done["text"], done["finish"]) == ("one", "stop")


def test_an_answer_that_fills_the_context_finishes_with_context_full(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(lambda tokens: ord("a"), n_ctx=40)
    done = llmcli("run", "fake", "x", "--temp", "0", "--json")
    assert parse_strict_json(done.out)["finish"] == "context_full"


def test_beams_are_reported_with_scores_best_first(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"It is Paris.")
    document = parse_strict_json(llmcli("run", "fake", "Which city?", "--beams", "3", "--json").out)
    shape = {
        **SHAPE,
        "beams": [{"text": str, "score": NUMBER}],
        "kv": dict.fromkeys(SHAPE["kv"], object),
    }
    assert type_errors(shape, document) == []
    assert len(document["beams"]) == 3
    assert document["beams"][0]["text"] == document["text"] == "It is Paris."
    done = llmcli(
        "run",
        "fake",
        "Which city?",
        "--beams",
        "2",
        "--length-penalty",
        "0",
        "--early-stopping",
        "yes",
    )
    assert done.out == "It is Paris.\n"
    assert [line.split()[:2] for line in done.err.splitlines()[-2:]] == [
        ["beam", "1"],
        ["beam", "2"],
    ]
    assert "warning" not in done.err


def test_sampling_settings_with_beams_are_a_warning(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"hello")
    done = llmcli("run", "fake", "x", "--beams", "2", "--temp", "2", "--top-k", "3")
    assert "with 2 beams the sampling settings do not apply: --temp, --top-k" in done.err
    assert done.out == "hello\n"


def test_three_questions_through_a_pipe_are_answered_in_order(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"ok")
    done = llmcli("chat", "fake", "--temp", "0", stdin=b"one\n\ntwo\r\nthree")
    assert (done.code, done.out) == (0, "ok\n" * 3)
    assert done.err.count("tok/s") == 3 * 2  # prefill and decode
    assert "(+0 reused)" in done.err.splitlines()[0]
    assert "(+0 reused)" not in done.err.splitlines()[1]


def test_an_invalid_line_is_an_error_and_the_next_line_is_answered(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"ok", n_ctx=128)
    lines = (
        b"/nonsense\n" + b"x" * 300 + b"\nbad \xff byte\n//exit is a message\n/set temp -1\nfine\n"
    )
    done = llmcli("chat", "fake", "--temp", "0", stdin=lines)
    assert (done.code, done.out) == (1, "ok\nok\n")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert [error.split(":")[1].split()[0] for error in errors] == ["no", "the", "stdin", "temp"]
    assert "byte 315 is 0xff" in errors[2]
    assert "Traceback" not in done.err


def test_lines_between_fences_are_one_message(llmcli: Llmcli, fake: Fake) -> None:
    opened = fake(b"ok")
    llmcli("chat", "fake", "--temp", "0", stdin=b'"""\n/a\nb\n"""\n')
    assert b"<user>/a\nb\n<assistant>ok" in bytes(
        t for t in opened[0].engine.ledger.tokens[0] if t < 256
    )


def test_bye_ends_the_chat_before_the_end_of_stdin(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"ok")
    assert llmcli("chat", "fake", stdin=b"/bye\nmore\n").out == ""


def test_a_system_text_that_the_template_drops_goes_into_the_first_message(
    llmcli: Llmcli, fake: Fake
) -> None:
    opened = fake(
        b"ok", template="{% for m in messages if m.role != 'system' %}<{{ m.content }}>{% endfor %}"
    )
    done = llmcli("chat", "fake", "-sys", "Be brief.", stdin=b"hi\nho\n")
    assert b"<Be brief.\n\nhi><" in bytes(t for t in opened[0].engine.ledger.tokens[0] if t < 256)
    assert done.err.count("does not support a system text") == 1


def test_a_template_that_raises_is_an_error_and_the_chat_continues(
    llmcli: Llmcli, fake: Fake
) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('alone') }}{% endif %}{{ messages[0].content }}"
    fake(b"ok", template=template)
    done = llmcli("chat", "fake", stdin=b"one\ntwo\n/clear\nthree\n")
    assert (done.code, done.out.count("ok")) == (1, 2)
    assert "error: the chat template refuses this conversation: alone" in done.err
    assert "Traceback" not in done.err


def test_a_chat_template_may_be_a_file_or_the_jinja_text_itself(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    opened = fake(b"ok")
    file = tmp_path / "mine.jinja"
    file.write_text("FILE {{ messages[0].content }}")
    for template, expected in (
        (str(file), b"FILE hi"),
        ("TEXT {{ messages[0].content }}", b"TEXT hi"),
    ):
        llmcli("run", "fake", "hi", "--chat-template", template)
        assert bytes(t for t in opened[-1].engine.ledger.tokens[0] if t < 256).startswith(expected)


@pytest.mark.parametrize(
    ("words", "stdin", "code", "message"),
    [
        (["run", "fake", "x", "--temp", "-1"], b"", 1, "temp must be from 0 to 100, not -1"),
        (["run", "fake", "x", "--temp", "nan"], b"", 1, "not nan"),
        (["run", "fake", "x", "--top-p", "1.5"], b"", 1, "top_p must be from 0 to 1, not 1.5"),
        (["run", "fake", "x", "--top-k", "many"], b"", 1, "top_k is 'many'"),
        (["run", "fake", "x", "--beams", "0"], b"", 1, "beams is '0'"),
        (["run", "fake", "x", "--beams", "many"], b"", 1, "beams is 'many'"),
        (["run", "fake", "x", "--length-penalty", "nan"], b"", 1, "length_penalty is 'nan'"),
        (["run", "fake", "x", "--early-stopping", "soon"], b"", 1, "early_stopping is 'soon'"),
        (["run", "fake", "x", "-ctk", "q9"], b"", 1, "unknown KV cache type 'q9'"),
        (["run", "fake", "x", "-fa", "perhaps"], b"", 1, "flash-attention"),
        (["run", "fake", "x", "-c", "-5"], b"", 1, "--ctx-size is -5"),
        (["run", "fake", "x", "-t", "99999"], b"", 1, "--threads is 99999"),
        (["run", "fake", "x", "-ub", "0"], b"", 1, "--ubatch-size is 0"),
        (["run", "fake", "x", "-n", "-7"], b"", 1, "--predict is -7"),
        (["run", "fake", "x", "--quant", "Q4_KM"], b"", 1, "Q4_KM"),
        (["run", "fake", "x", "--chat-template", "no/such/file"], b"", 1, "no template file"),
        (["run", "fake", "x", "-p", "y"], b"", 2, "twice"),
        (["run", "fake", "-p", "y", "-f", "z"], b"", 2, "-p and -f"),
        (["run", "fake", "-f", "no/such/file"], b"", 1, "cannot read"),
        (["run", "-m", "fake", "fake", "x"], b"", 2, "two models"),
        (["run"], b"", 2, "no model given"),
        (["run", "fake"], b"", 1, "the prompt is empty"),
        (["run", "fake"], b"caf\xe9", 1, "byte 3 is 0xe9"),
        (["run", "fake", "caf\udce9"], b"", 1, "PROMPT is not UTF-8 text: byte 3 is 0xe9"),
        (["run", "fake", "x", "-sys", "caf\udce9"], b"", 1, "--system is not UTF-8"),
        (["run", "fake", "x", "-r", "caf\udce9"], b"", 1, "not UTF-8"),
        (["run", "fake", "x" * 500], b"", 1, "the prompt has"),
        (["chat", "fake", "-m", "other"], b"", 2, "two models"),
        (["run", "fake", "x", "--samples", "0"], b"", 1, "--samples is 0"),
        (["run", "fake", "x", "--samples", "-1"], b"", 1, "--samples is -1"),
        (["run", "fake", "x", "--samples", "257"], b"", 1, "--samples is 257"),
        (
            ["run", "fake", "x", "--samples", "100", "-n", "5"],
            b"",
            1,
            "100 samples of 5 tokens and a prompt of 20 ",
        ),
        (
            ["run", "fake", "x", "--samples", "250"],
            b"",
            1,
            "250 samples and a prompt of 20 tokens need 270 cells",
        ),
        (["chat", "fake", "--samples", "2"], b"x", 2, "one answer at a time"),
        (["run", "fake", "x", "--samples", "2", "--beams", "2"], b"", 2, "cannot be combined"),
        (["run", "fake", "x", "-l", "999+1"], b"", 1, "logit_bias names token 999"),
        (["run", "fake", "x", "-l", "h+1"], b"", 1, "logit_bias is 'h+1'"),
        (["run", "fake", "x", "--mirostat", "3"], b"", 1, "mirostat must be from 0 to 2, not 3"),
    ],
)
def test_invalid_input_is_one_error_and_one_hint(
    llmcli: Llmcli, fake: Fake, words: list[str], stdin: bytes, code: int, message: str
) -> None:
    fake()
    done = llmcli(*words, stdin=stdin)
    first, second, *extra_lines = done.err.splitlines()
    assert (done.code, done.out) == (code, "")
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("hint: ")
    assert extra_lines == []


def test_samples_are_printed_in_order_with_their_seeds(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"ok")
    done = llmcli("run", "fake", "x", "--temp", "0", "-s", "5", "--samples", "2")
    assert done.out == "--- sample 1 · seed 5 ---\nok\n--- sample 2 · seed 6 ---\nok\n"
    assert done.err.startswith("[2 samples · ")
    assert "4 tok" in done.err


def test_samples_in_json_each_have_tokens_finish_and_seed(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"ok")
    words = ["run", "fake", "x", "--temp", "0", "-s", "5", "--json"]
    document = parse_strict_json(llmcli(*words, "--samples", "3").out)
    shape = {"text": str, "tokens": SHAPE["tokens"], "finish": str, "seed": int}
    assert type_errors([shape], document["samples"]) == []
    assert [sample["seed"] for sample in document["samples"]] == [5, 6, 7]
    assert [sample["text"] for sample in document["samples"]] == ["ok"] * 3
    assert document["seed"] == 5
    assert document["tokens"] == document["samples"][0]["tokens"]
    assert "samples" not in parse_strict_json(llmcli(*words, "--samples", "1").out)


def test_several_logit_biases_apply_together(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"ok")
    bias = ["-l", f"{ord('o')}-inf", "--logit-bias", f"{ord('a')}+100"]
    assert llmcli("run", "fake", "x", "--temp", "0", "-n", "3", *bias).out == "aaa\n"
    assert (
        llmcli("chat", "fake", *bias, stdin=b"/set logit_bias\n/set logit_bias none\n").out.count(
            "97+100"
        )
        == 1
    )


def test_a_full_disk_is_one_error(
    llmcli: Llmcli, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake()

    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    for form in ((), ("--json",)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", FullDisk())
            done = llmcli("run", "fake", "x", *form)
        assert done.code == 1
        assert done.err.startswith(
            "error: cannot write the output: No space left on device\nhint: "
        )


@pytest.mark.model
def test_ctrl_c_ends_run_with_the_partial_answer_and_exit_code_130(smollm2: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "llmcli.app",
        "run",
        str(smollm2),
        "Hello",
        "-t",
        "1",
        "--ignore-eos",
    ]
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    remaining, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert (first + remaining).endswith(b"\n")
    assert err.rstrip().endswith(b"(stopped by the user)")


@pytest.mark.model
def test_ctrl_c_during_an_answer_ends_a_piped_chat(smollm2: Path, home: Path) -> None:
    words = [sys.executable, "-m", "llmcli.app", "chat", str(smollm2), "-t", "1", "--ignore-eos"]
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    child.stdin.write(b"one\ntwo\n")
    child.stdin.flush()
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert b"Traceback" not in err
    (log,) = (home / "state" / "sessions").glob("*.jsonl")
    assert [parse_strict_json(line)["finish"] for line in log.read_text().splitlines()] == [
        "cancelled"
    ]


def test_the_automatic_values_of_llama_cpp_flags_are_accepted(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"ok")
    line = "-m fake -p hi -n -1 -c 0 -t -1 -tb 0 -b 2048 -ub 512 -ngl 99 -fa auto -ctk f16 -ctv f16 -s 1 --temp 0"
    assert llmcli("run", *line.split()).out == "ok\n"


@pytest.mark.parametrize("form", [(), ("--json",), ("--temp", "0")])
def test_nan_weights_are_one_error(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, form: tuple[str, ...]
) -> None:
    original, damaged = stories_gguf.read_bytes(), tmp_path / "damaged.gguf"
    damaged.write_bytes(
        original[: len(original) // 2] + b"\xff" * (len(original) - len(original) // 2)
    )
    done = llmcli("run", str(damaged), "Once", "-n", "4", "-t", "1", *form)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-2].startswith("error: the model computes no numbers (NaN)")
    assert done.err.splitlines()[-1].startswith("hint: ")


def test_predict_0_generates_nothing(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"hello")
    document = parse_strict_json(llmcli("run", "fake", "hi", "-n", "0", "--json").out)
    assert (document["text"], document["tokens"], document["finish"]) == ("", [], "length")


def test_an_unknown_model_suggests_the_nearest_name(llmcli: Llmcli) -> None:
    done = llmcli("run", "smolm2:135m", "hi")
    assert done.code == 1
    assert "did you mean smollm2:135m" in done.err


@pytest.mark.model
def test_run_json_has_the_documented_keys_and_consistent_figures(
    llmcli: Llmcli, smollm2: Path
) -> None:
    done = llmcli(
        "run",
        str(smollm2),
        "Hello",
        "--json",
        "-n",
        "8",
        "-t",
        "1",
        "-c",
        "512",
        "-s",
        "7",
        "--ignore-eos",
    )
    document = parse_strict_json(done.out)
    assert done.code == 0
    assert type_errors(SHAPE, document) == []
    assert (document["finish"], document["seed"], document["model"]["file_type"]) == (
        "length",
        7,
        "Q4_1",
    )
    tokens, timing, kv = document["tokens"], document["timing"], document["kv"]
    assert "".join(token["text"] for token in tokens) == document["text"]
    assert len(tokens) == timing["generated_tokens"] == 8
    assert all(token["logprob"] <= 0 for token in tokens)
    assert all(token["decode_ms"] + token["sample_ms"] <= token["ms"] for token in tokens)
    assert timing["ttft_ms"] == tokens[0]["ms"]
    assert timing["tpot_ms"] == pytest.approx(sum(token["ms"] for token in tokens[1:]) / 7)
    assert timing["itl_ms"]["max"] == max(token["ms"] for token in tokens[1:])
    assert kv["used_cells"] == timing["prompt_tokens"] + 7  # the last token is not in the cache
    assert kv["predicted_bytes"] == kv["allocated_bytes"] == kv["bytes_per_token"] * kv["cells"]


@pytest.mark.model
def test_the_second_turn_of_a_chat_reuses_the_first(
    llmcli: Llmcli, smollm2: Path, home: Path
) -> None:
    words = ["-t", "1", "-c", "1024", "-n", "8", "--temp", "0"]
    done = llmcli("chat", str(smollm2), *words, stdin=b"Hello\n/kv\nAnd again\nMore\n")
    assert done.code == 0
    assert done.out.count("difference") == 1
    (log,) = (home / "state" / "sessions").glob("*.jsonl")
    first, second, third = (
        parse_strict_json(line)["timing"] for line in log.read_text().splitlines()
    )
    assert first["cached_tokens"] == 0
    # The first prompt and answer, except the answer's last token, which was never decoded.
    assert second["cached_tokens"] >= first["prompt_tokens"] + first["generated_tokens"] - 2
    assert third["cached_tokens"] > second["cached_tokens"]


def test_run_with_a_prompt_leaves_stdin_to_the_shell(stories_gguf: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\nthree\n")
    run = f"{sys.executable} -m llmcli.app run {stories_gguf} --raw -n 1 -t 1"
    loop = f'while read -r line; do {run} "$line"; echo; echo "$line" >&3; done < {lines} 3>&1 >&2'
    done = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["one", "two", "three"]
    assert "stdin was not read, because there is a prompt; -f - adds it" in done.stderr


def test_run_with_a_prompt_does_not_wait_for_a_stdin_that_stays_open(stories_gguf: Path) -> None:
    words = [sys.executable, "-m", "llmcli.app", "run", str(stories_gguf), "Once", "--raw"]
    with subprocess.Popen(
        [*words, "-n", "1", "-t", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout
        assert child.wait() == 0
        assert child.stdout.read()


def test_the_system_text_may_be_in_a_file(llmcli: Llmcli, fake: Fake, tmp_path: Path) -> None:
    fake(b"yes")
    file = tmp_path / "system.txt"
    file.write_bytes(b"\xef\xbb\xbfSpeak\r\nLatin.\n")
    out = llmcli("chat", "fake", "-sysf", str(file), stdin=b"/show system\n").out
    assert "Speak\nLatin." in out
    both = llmcli("run", "fake", "x", "-sysf", str(file), "-sys", "y")
    assert both.code == 2
    assert "-sys and -sysf" in both.err


def test_kv_shows_the_checkpoints_of_a_recurrent_model(llmcli: Llmcli, tmp_path: Path) -> None:
    from llmcli.planning.prediction.cache_layout import checkpoint_bytes
    from llmcli.runtime.binding.contexts.context_options import ContextOptions
    from quant.model_file.read_header import read_header
    from tests.quant import tiny_gguf

    model = tiny_gguf.mamba(tmp_path / "mamba.gguf")
    flags = ("--raw", "-n", "4", "-t", "1", "-c", "512")
    done = llmcli("chat", str(model), *flags, stdin=b"ab\n/kv\n" + b"w1 w2\n" * 9 + b"/kv\n")
    assert done.code == 0, done.err
    size = checkpoint_bytes(read_header(model), ContextOptions(512))
    assert size
    rows = [
        re.search(r"checkpoints +(\d+) with ([\d,]+) .* at tokens (…, )?(.*)", line)
        for line in done.out.splitlines()
        if line.startswith("checkpoints")
    ]
    few, many = rows
    assert few and many
    for row in (few, many):
        assert int(row[2].replace(",", "")) == int(row[1]) * size
        lengths = [int(word) for word in row[4].split(", ")]
        assert lengths == sorted(set(lengths))
        assert len(lengths) == min(8, int(row[1]))
    assert not few[3] and many[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mcp", "x", "--samples", "2"], "--mcp cannot be combined with --samples"),
        (["--mcp", "x", "--raw"], "--mcp cannot be combined with --raw"),
        (["--mcp", "x", "-j", "{}"], "--mcp cannot be combined with a grammar or schema"),
        (["--mcp", "x", "--skeleton"], "--skeleton calls no tools"),
        (["--allow-tool", "x", "--skeleton"], "--skeleton calls no tools"),
        (["--mcp", "x", "--replay", "x"], "--replay calls no tools"),
        (["--allow-tool", "x"], "--allow-tool applies to --mcp"),
        (["--tool-rounds", "3"], "--tool-rounds applies to --mcp"),
    ],
)
def test_options_about_tools_that_do_not_fit_are_refused(
    llmcli: Llmcli, fake: Fake, words: list[str], message: str
) -> None:
    opened = fake()
    done = llmcli("run", "fake", "hi", *words)
    assert (done.code, done.out, opened) == (2, "", [])
    assert message in done.err


def test_a_run_calls_tools_and_its_document_has_the_calls(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp: pip install 'llmcli[mcp]'")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    fake(answering(call, "It is 5."), n_ctx=16_384)
    file = tmp_path / "servers.json"
    server = {"command": sys.executable, "args": [tool_server.__file__, "honest"]}
    file.write_text(json.dumps({"mcpServers": {"srv": server}}))
    done = llmcli("run", "fake", "2 + 3?", "--mcp", str(file), "--allow-tool", "*", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["text"] == "It is 5."
    assert "add" in document["tools"]
    assert [call["result"] for call in document["tool_steps"][0]["calls"]] == ["5"]
    receipt = tmp_path / "run.json"
    receipt.write_text(done.out)
    replayed = llmcli("run", "--replay", str(receipt))
    assert (replayed.code, "this run had tools" in replayed.err) == (1, True)
