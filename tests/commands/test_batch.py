"""`llmcli batch` on the command line: input, output, interruption and resuming."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.runtime.engine.engine import Engine
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.batch.test_skeleton_of_thought import skeleton_reply
from tests.fixtures.cli import Done
from tests.quant import tiny_checkpoint

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]

VALID_AND_INVALID_LINES = [
    '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", '
    '"content": "hi"}], "n": 2, "temperature": 0}}',
    '"one"',
    "{bad",
    "",
    '{"prompt": "two", "max_tokens": 2}',
    '{"messages": [{"role": "king", "content": ""}]}',
]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_input(tmp_path: Path, *rows: str) -> str:
    """Write these lines to in.jsonl, and return its path."""
    (tmp_path / "in.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return str(tmp_path / "in.jsonl")


def test_every_line_gets_its_answer_in_order(llmcli: Llmcli, fake: Fake, tmp_path: Path) -> None:
    fake(b"hello")
    out = tmp_path / "out.jsonl"
    done = llmcli(
        "batch", "fake", write_input(tmp_path, *VALID_AND_INVALID_LINES), "-o", str(out), "--json"
    )
    assert done.code == 1
    assert "2 of 5 lines have no answer" in done.err
    rows = read_rows(out)
    assert [row["custom_id"] for row in rows] == ["a", "line-2", "line-3", "line-5", "line-6"]
    bodies = [row["response"]["body"] if row["response"] else {} for row in rows]
    texts = [
        [choice["message"]["content"] for choice in body.get("choices", [])] for body in bodies
    ]
    assert texts == [["hello", "hello"], ["hello"], [], ["he"], []]
    usage = bodies[0]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (10, usage["prompt_tokens"] + 10)
    assert "prompt_tokens_details" not in usage  # the cached tokens depend on the other lines
    assert rows[2]["error"]["line"] == 3
    assert (rows[4]["response"]["status_code"], rows[4]["error"]) == (400, None)
    assert rows[4]["response"]["body"]["error"]["param"] == "messages[0].role"
    document = json.loads(done.out)
    assert (document["lines"], document["failed"], document["finished"]) == (5, 2, True)
    assert document["path"] == str(out)


def test_lines_with_the_same_custom_id_are_a_warning_and_are_answered_in_order(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"hello")
    rows = [
        json.dumps({"custom_id": "a", "prompt": "one", "max_tokens": count})
        for count in (1, 2, 3, 4, 5)
    ]
    done = llmcli("batch", "fake", write_input(tmp_path, *rows), "-o", str(tmp_path / "out.jsonl"))
    assert done.code == 0
    assert (
        "lines 1 and 2 have the same custom_id, 'a'" in done.err and "and 1 more line" in done.err
    )
    answers = [
        row["response"]["body"]["choices"][0]["message"]["content"]
        for row in read_rows(tmp_path / "out.jsonl")
    ]
    assert answers == ["h", "he", "hel", "hell", "hello"]


def test_the_openai_client_parses_the_output(llmcli: Llmcli, fake: Fake, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai.types.chat")
    fake(b"hello")
    llmcli("batch", "fake", write_input(tmp_path, '"one"'), "-o", str(tmp_path / "out"))
    (row,) = read_rows(tmp_path / "out")
    completion = openai.ChatCompletion.model_validate(row["response"]["body"], strict=True)
    assert completion.choices[0].message.content == "hello"


def test_a_complete_output_is_left_unless_forced_or_settings_differ(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"hello")
    words = ("batch", "fake", write_input(tmp_path, '"one"', '"two"'), "-o", str(tmp_path / "out"))
    assert "2 lines, " in llmcli(*words).out
    before = (tmp_path / "out").read_bytes()
    assert "already complete" in llmcli(*words).out
    assert "already complete" not in llmcli(*words, "--force").out
    assert (tmp_path / "out").read_bytes() == before
    done = llmcli(*words, "--temp", "0.3")  # other settings replace the output
    assert "already complete" not in done.out
    assert (tmp_path / "out").read_bytes() != before


def test_input_is_read_from_stdin(llmcli: Llmcli, fake: Fake, tmp_path: Path) -> None:
    fake(b"hello")
    assert llmcli("batch", "fake", "-", "-o", str(tmp_path / "out"), stdin=b'"a"\n"b"').code == 0
    assert len(read_rows(tmp_path / "out")) == 2


@pytest.mark.parametrize("stop_at", [1, 3, 9])
def test_an_interrupted_batch_resumes_with_the_same_output(
    llmcli: Llmcli, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    fake(b"hello")
    input_path = write_input(tmp_path, *(f'"{n}"' for n in range(20)))
    llmcli("batch", "fake", input_path, "-o", str(tmp_path / "whole"), "-np", "2")
    step, count = Engine.step, 0

    def interrupting_step(engine: Engine) -> Any:
        nonlocal count
        count += 1
        if count == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    words = ("batch", "fake", input_path, "-o", str(tmp_path / "out"), "-np", "2")
    monkeypatch.setattr(Engine, "step", interrupting_step)
    done = llmcli(*words)
    assert done.code == 130
    assert "the same command resumes" in done.err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(Engine, "step", step)
    assert llmcli(*words).code == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_embeddings_are_normalized_and_shortened_as_on_the_server(
    llmcli: Llmcli, model: Path, tmp_path: Path
) -> None:
    def line(name: str, **body: Any) -> str:
        return json.dumps(
            {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body}
        )

    rows = (
        line("a", input=["Once upon", "a time"], dimensions=8),
        line("b", input=[]),
        line("c", input="Once upon"),
    )
    done = llmcli(
        "batch",
        str(model),
        write_input(tmp_path, *rows, '"x"'),
        "-o",
        str(tmp_path / "out"),
        "-n",
        "3",
        "--raw",
    )
    assert done.code == 1
    first, second, third, fourth = (row["response"] for row in read_rows(tmp_path / "out"))
    assert [len(entry["embedding"]) for entry in first["body"]["data"]] == [8, 8]
    assert second["status_code"] == 400
    vector = third["body"]["data"][0]["embedding"]
    assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-5)
    norm_of_8 = sum(number * number for number in vector[:8]) ** 0.5
    assert first["body"]["data"][0]["embedding"] == pytest.approx(
        [number / norm_of_8 for number in vector[:8]], abs=5e-3
    )
    assert fourth["status_code"] in (200, 404)


def test_a_schema_flag_applies_to_lines_without_a_response_format(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"yes")
    with_own_format = json.dumps({"prompt": "b", "response_format": {"type": "text"}})
    words = (
        "batch",
        "fake",
        write_input(tmp_path, '"a"', with_own_format),
        "-o",
        str(tmp_path / "out"),
    )
    assert llmcli(*words, "-j", '{"const": 7}').code == 0
    assert answers_by_id(tmp_path / "out") == {"line-1": "7", "line-2": "yes"}


def test_a_journal_of_another_input_is_an_error(llmcli: Llmcli, fake: Fake, tmp_path: Path) -> None:
    fake(b"hello")
    (tmp_path / ".out.journal").write_text('{"form": "llmcli batch 1", "input": "x"}\n')
    done = llmcli("batch", "fake", write_input(tmp_path, '"one"'), "-o", str(tmp_path / "out"))
    assert done.code == 1
    assert "another input" in done.err
    assert "--force starts again" in done.err


def test_an_invalid_output_path_is_an_error_before_the_model_is_loaded(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    opened = fake(b"hello")
    input_path = write_input(tmp_path, '"one"')
    assert (
        "there is no folder"
        in llmcli("batch", "fake", input_path, "-o", str(tmp_path / "none" / "out")).err
    )
    assert llmcli("batch", "fake", input_path, "-o", input_path).code == 2
    (tmp_path / "folder").mkdir()
    assert (
        "it is a folder" in llmcli("batch", "fake", input_path, "-o", str(tmp_path / "folder")).err
    )
    assert not opened  # loading a model may take minutes
    assert Path(input_path).read_text() == '"one"\n'


def test_seeds_depend_on_the_custom_id_and_not_on_the_order(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(lambda tokens: len(tokens) % 2 + 60)  # at temperature 100 the seed decides the token
    rows = [json.dumps({"custom_id": f"n{n}", "prompt": "same", "max_tokens": 8}) for n in range(6)]
    sampling_flags = ("--temp", "100", "--top-k", "0", "--min-p", "0", "--top-p", "1")
    llmcli(
        "batch", "fake", write_input(tmp_path, *rows), "-o", str(tmp_path / "one"), *sampling_flags
    )
    llmcli(
        "batch",
        "fake",
        write_input(tmp_path, *reversed(rows)),
        "-o",
        str(tmp_path / "two"),
        *sampling_flags,
        "-np",
        "2",
    )
    llmcli(
        "batch",
        "fake",
        write_input(tmp_path, *rows),
        "-o",
        str(tmp_path / "three"),
        *sampling_flags,
        "-s",
        "7",
    )

    assert (
        answers_by_id(tmp_path / "one")
        == answers_by_id(tmp_path / "two")
        != answers_by_id(tmp_path / "three")
    )
    assert len(set(answers_by_id(tmp_path / "one").values())) > 1


def test_run_skeleton_answers_every_point(llmcli: Llmcli, fake: Fake) -> None:
    fake(skeleton_reply, n_ctx=8192)
    done = llmcli("run", "fake", "How?", "--skeleton", "-n", "300", "--temp", "0")
    assert (done.code, done.out) == (
        0,
        "1. Find out first: ttt\n\n2. Then: nnn\n\n3. Tell them: mmm\n",
    )
    assert "3 points at once" in done.err
    document = json.loads(
        llmcli("run", "fake", "How?", "--skeleton", "-n", "300", "--temp", "0", "--json").out
    )
    assert (document["finish"], len(document["skeleton"])) == ("stop", 3)


@pytest.fixture(scope="module")
def model(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama model in Q8_0 whose heads have 32 dimensions, as the reproducible mode's q8_0
    cache needs.
    """
    folder = tmp_path_factory.mktemp("grown")
    checkpoint, out = (
        tiny_checkpoint.random_llama(stories, folder / "model", hidden=256, layers=2, shards=1),
        folder / "q8.gguf",
    )
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(checkpoint), "Q8_0"),
        out,
        threads=1,
    )
    return out


def test_a_batch_killed_twice_writes_the_file_of_an_uninterrupted_run(
    llmcli: Llmcli, model: Path, tmp_path: Path
) -> None:
    rows = [json.dumps({"prompt": f"Once {n} upon", "max_tokens": 6 + n % 20}) for n in range(50)]
    flags = ["batch", str(model), write_input(tmp_path, *rows), "--reproducible", "-t", "1"]
    flags += ["--chat-template", "{{ messages[0].content }}", "-o"]
    words = [sys.executable, "-m", "llmcli.app", *flags]
    assert llmcli(*flags, str(tmp_path / "whole"), "-np", "4").code == 0
    journal = tmp_path / ".out.journal"
    for kill_at in (3, 25):
        child = subprocess.Popen(
            [*words, str(tmp_path / "out"), "-np", "4"], stderr=subprocess.DEVNULL
        )
        while child.poll() is None and (
            not journal.exists() or journal.read_bytes().count(b"\n") < kill_at
        ):
            os.sched_yield()
        child.kill()
        child.wait()
        assert not (tmp_path / "out").exists()
    done = subprocess.run(
        [*words, str(tmp_path / "out"), "-np", "4"], check=True, capture_output=True, text=True
    )
    assert "resuming after" in done.stderr
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert llmcli(*flags, str(tmp_path / "seven"), "-np", "7", "-c", "1500").code == 0
    assert answers_by_id(tmp_path / "seven") == answers_by_id(tmp_path / "whole")


def answers_by_id(path: Path) -> dict[str, str]:
    """Return the text of each answer by its custom_id."""
    return {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
        for row in read_rows(path)
    }
