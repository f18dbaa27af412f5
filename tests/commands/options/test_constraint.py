import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.cli import Done
from tests.fixtures.fakes import TEMPLATE

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]
CALL = {
    "type": "object",
    "properties": {
        "radius": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["metre", "inch"]},
    },
    "required": ["radius", "unit"],
    "additionalProperties": False,
}


def test_run_answers_with_a_document_of_the_schema(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"Gladly! It is 4 metres.")
    file = tmp_path / "call.json"
    file.write_text(json.dumps(CALL))
    for words in (
        ["-jf", str(file)],
        ["--json-schema", json.dumps(CALL)],
        ["-j", json.dumps(CALL), "--temp", "0"],
    ):
        done = llmcli("run", "fake", "Which radius?", *words)
        assert done.code == 0, done.err
        jsonschema.validate(json.loads(done.out), CALL)
        assert "tok forced" in done.err


def test_json_tells_of_the_constraint_and_marks_forced_tokens(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    told = json.loads(llmcli("run", "fake", "Which?", "-j", json.dumps(CALL), "--json").out)
    jsonschema.validate(json.loads(told["text"]), CALL)
    forced = [token for token in told["tokens"] if token["forced"]]
    assert told["constraint"] == {
        "kind": "json_schema",
        "engine": "llguidance",
        "jump": "lossless",
        "complete": True,
        "forced_tokens": len(forced),
        "constraint_ms": pytest.approx(sum(t["constraint_ms"] for t in told["tokens"])),
    }
    assert len(forced) > 15
    assert {token["logprob"] for token in forced} == {None}
    assert told["finish"] == "stop"


def test_an_answer_that_was_cut_is_no_success_and_says_why(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(CALL), "-n", "7")
    assert done.code == 1
    assert done.out == '{"radiu\n'
    assert (
        "error: the JSON document is incomplete: the limit of 7 tokens was reached\nhint: "
        in done.err
    )
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(CALL), "-r", "unit", "--json")
    assert done.code == 1
    told = json.loads(done.out)
    assert (told["constraint"]["complete"], told["finish"]) == (False, "stop")
    assert "a stop text came first" in done.err
    fake(b"Gladly!", n_ctx=40)
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(CALL))
    assert done.code == 1
    assert "incomplete: the context is full" in done.err


def test_an_answer_may_end_at_its_limit_where_the_grammar_accepts(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"aaaaaaaaaaaaaaaaaaaaa")
    done = llmcli("run", "fake", "Which?", "--grammar", "root ::= [a-z]+", "-n", "4", "--temp", "0")
    assert (done.code, done.out) == (0, "aaaa\n")


def test_beams_are_documents_of_the_schema_all_of_them(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"Gladly! It is 4 metres.")
    file = tmp_path / "call.json"
    file.write_text(json.dumps(CALL))
    done = llmcli("run", "fake", "Which radius?", "-jf", str(file), "--beams", "4", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert [one["complete"] for one in told["beams"]] == [True] * 4
    for one in told["beams"]:
        jsonschema.validate(json.loads(one["text"]), CALL)
    assert len({one["text"] for one in told["beams"]}) == 4
    assert told["text"] == told["beams"][0]["text"]
    assert (told["constraint"]["jump"], told["constraint"]["complete"]) == ("off", True)
    assert told["constraint"]["constraint_ms"] == pytest.approx(
        sum(t["constraint_ms"] for t in told["tokens"])
    )
    cut = llmcli("run", "fake", "Which radius?", "-jf", str(file), "--beams", "4", "-n", "7")
    assert (cut.code, cut.out) == (1, '{"radiu\n')
    assert "error: the JSON document is incomplete: the limit of 7 tokens was reached\n" in cut.err


def test_samples_are_told_apart(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("run", "fake", "Which?", "-j", '{"type": "boolean"}', "--samples", "3", "--json")
    told = json.loads(done.out)["samples"]
    assert {json.loads(one["text"]) for one in told} <= {True, False}
    assert [one["constraint"]["complete"] for one in told] == [True] * 3
    assert done.code == 0
    cut = llmcli(
        "run", "fake", "Which?", "-j", json.dumps(CALL), "--samples", "2", "-n", "9", "--json"
    )
    assert [one["constraint"]["complete"] for one in json.loads(cut.out)["samples"]] == [
        False,
        False,
    ]
    assert cut.code == 1


def test_the_document_comes_after_the_thinking_that_the_prompt_opens(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(
        b"Let me see.</think>\n\nIt is four.",
        template=TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}",
    )
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(CALL), "--temp", "0")
    assert done.code == 0, done.err
    jsonschema.validate(json.loads(done.out), CALL)
    told = json.loads(
        llmcli("run", "fake", "Which?", "-j", json.dumps(CALL), "--temp", "0", "--json").out
    )
    assert told["thinking"] == "<think>Let me see.</think>"
    jsonschema.validate(json.loads(told["content"]), CALL)
    assert told["constraint"]["complete"]
    assert not any(token["forced"] for token in told["tokens"][:19])
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(CALL), "--temp", "0", "-n", "5")
    assert done.code == 1
    assert "incomplete: the limit of 5 tokens" in done.err


def test_every_answer_of_a_chat_follows_the_grammar(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("chat", "fake", "--grammar", 'root ::= "yes" | "no"', stdin=b"Is it?\nReally?\n")
    assert done.code == 0
    assert set(done.out.split()) <= {"yes", "no"}
    assert len(done.out.split()) == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-j", "{}", "--grammar", 'root ::= "a"'], 2, "both constrain the answer"),
        (["-j", "{}", "-jf", "file"], 2, "both constrain the answer"),
        (["-j", "{}", "--grammar-engine", "llama"], 2, "but not JSON schemas"),
        (["-j", "{}", "--ignore-eos"], 2, "but --ignore-eos continues it"),
        (
            ["-j", "{}", "--beams", "2", "--jump", "fast"],
            2,
            "--jump fast does not work with --beams",
        ),
        (["--jump", "off"], 2, "--jump needs a grammar or schema"),
        (["-j", "{}", "--jump", "high"], 1, "--jump is 'high'"),
        (["-j", "{}", "--grammar-engine", "x"], 1, "--grammar-engine is 'x'"),
        (["-jf", "no-such-file"], 1, "cannot read no-such-file"),
        (["-jf", "/dev/zero"], 1, "/dev/zero has more than 67,108,864 bytes"),
        (["-j", "{'a': 1}"], 1, "the schema is not JSON"),
        (["-j", '{"not": {}}'], 1, "cannot be enforced: not at #"),
        (["--grammar", "root ::= <[5]>"], 1, "tokens in a grammar need --grammar-engine llama"),
        (
            ["--grammar", "root ::= nothing"],
            1,
            "line 1, column 10: there is no rule called nothing",
        ),
    ],
)
def test_contradictions_and_mistakes_are_one_line_before_a_model_is_loaded(
    words: list[str], code: int, message: str, llmcli: Llmcli
) -> None:
    done = llmcli("run", "no-model-of-this-name", "Which?", *words)
    assert (done.code, done.out) == (code, "")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_what_only_the_engine_refuses_leaves_the_chat_intact(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("run", "fake", "Which?", "-j", '{"items": {"type": "text"}}')
    assert done.code == 1
    assert done.err.startswith(
        "error: the schema cannot be followed at #/items: Invalid type: text\n"
    )


@pytest.mark.parametrize(
    "settings",
    [{"temp": 0}, {"seed": 3}, {"mirostat": 2}, {"xtc_probability": 0.5, "typical": 0.5}],
    ids=str,
)
def test_a_real_models_answers_are_valid(settings: dict[str, float], stories_gguf: Path) -> None:
    schema = {
        **CALL,
        "properties": {**CALL["properties"], "note": {"type": "string", "maxLength": 12}},
    }  # type: ignore[dict-item]
    asked = Constraint(
        "json_schema", json.dumps({**schema, "required": ["radius", "unit", "note"]})
    )
    with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1), raw=True) as runner:
        request = Request(
            runner.encode_text("Once upon a time"),
            default_sampling().with_values(settings),
            128,
            strategy="guided",
            grammar=runner.grammars(asked),
            logprobs=True,
        )
        reply = runner.reply(request)
        list(reply)
        runner.engine.ledger.check()
    jsonschema.validate(json.loads(reply.answer.text), json.loads(asked.text))
    assert any(token.forced for token in reply.answer.tokens)
