"""`run` and `chat` with a JSON schema or a grammar."""

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
SCHEMA = {
    "type": "object",
    "properties": {
        "radius": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["metre", "inch"]},
    },
    "required": ["radius", "unit"],
    "additionalProperties": False,
}


def test_run_generates_a_document_that_matches_the_schema(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"Gladly! It is 4 metres.")
    file = tmp_path / "call.json"
    file.write_text(json.dumps(SCHEMA))
    for words in (
        ["-jf", str(file)],
        ["--json-schema", json.dumps(SCHEMA)],
        ["-j", json.dumps(SCHEMA), "--temp", "0"],
    ):
        done = llmcli("run", "fake", "Which radius?", *words, "--jump", "fast")
        assert done.code == 0, done.err
        jsonschema.validate(json.loads(done.out), SCHEMA)
        assert "tok forced" in done.err


def test_json_describes_the_constraint_and_marks_forced_tokens(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    words = ("run", "fake", "Which?", "-j", json.dumps(SCHEMA), "--jump", "fast", "--json")
    document = json.loads(llmcli(*words).out)
    jsonschema.validate(json.loads(document["text"]), SCHEMA)
    forced = [token for token in document["tokens"] if token["forced"]]
    assert document["constraint"] == {
        "kind": "json_schema",
        "engine": "llguidance",
        "jump": "fast",
        "not_enforced": [],
        "complete": True,
        "forced_tokens": len(forced),
        "constraint_ms": pytest.approx(sum(t["constraint_ms"] for t in document["tokens"])),
    }
    assert forced
    assert {token["logprob"] for token in forced} == {None}
    assert document["finish"] == "stop"


def test_a_truncated_document_is_an_error_with_the_reason(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(SCHEMA), "-n", "7")
    assert done.code == 1
    assert done.out.startswith("{")
    assert (
        "error: the JSON document is incomplete: the limit of 7 tokens was reached\nhint: "
        in done.err
    )
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(SCHEMA), "-r", "unit", "--json")
    assert done.code == 1
    document = json.loads(done.out)
    assert (document["constraint"]["complete"], document["finish"]) == (False, "stop")
    assert "a stop text came first" in done.err
    fake(b"Gladly!", n_ctx=40)
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(SCHEMA))
    assert done.code == 1
    assert "incomplete: the context is full" in done.err


def test_an_answer_may_end_at_its_limit_when_the_grammar_accepts_it(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(b"aaaaaaaaaaaaaaaaaaaaa")
    done = llmcli("run", "fake", "Which?", "--grammar", "root ::= [a-z]+", "-n", "4", "--temp", "0")
    assert (done.code, done.out) == (0, "aaaa\n")


def test_every_beam_is_a_document_that_matches_the_schema(
    llmcli: Llmcli, fake: Fake, tmp_path: Path
) -> None:
    fake(b"Gladly! It is 4 metres.")
    file = tmp_path / "call.json"
    file.write_text(json.dumps(SCHEMA))
    done = llmcli("run", "fake", "Which radius?", "-jf", str(file), "--beams", "4", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert [beam["complete"] for beam in document["beams"]] == [True] * 4
    for beam in document["beams"]:
        jsonschema.validate(json.loads(beam["text"]), SCHEMA)
    assert len({beam["text"] for beam in document["beams"]}) == 4
    assert document["text"] == document["beams"][0]["text"]
    assert (document["constraint"]["jump"], document["constraint"]["complete"]) == ("off", True)
    assert document["constraint"]["constraint_ms"] == pytest.approx(
        sum(t["constraint_ms"] for t in document["tokens"])
    )
    truncated = llmcli("run", "fake", "Which radius?", "-jf", str(file), "--beams", "4", "-n", "7")
    assert (truncated.code, truncated.out) == (1, '{"radiu\n')
    assert (
        "error: the JSON document is incomplete: the limit of 7 tokens was reached\n"
        in truncated.err
    )


def test_every_sample_reports_whether_its_document_is_complete(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("run", "fake", "Which?", "-j", '{"type": "boolean"}', "--samples", "3", "--json")
    samples = json.loads(done.out)["samples"]
    assert {json.loads(sample["text"]) for sample in samples} <= {True, False}
    assert [sample["constraint"]["complete"] for sample in samples] == [True] * 3
    assert done.code == 0
    truncated = llmcli(
        "run", "fake", "Which?", "-j", json.dumps(SCHEMA), "--samples", "2", "-n", "9", "--json"
    )
    assert [
        sample["constraint"]["complete"] for sample in json.loads(truncated.out)["samples"]
    ] == [
        False,
        False,
    ]
    assert truncated.code == 1


def test_the_document_follows_the_thinking_that_the_prompt_opens(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(
        b"Let me see.</think>\n\nIt is four.",
        template=TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}",
    )
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(SCHEMA), "--temp", "0")
    assert done.code == 0, done.err
    jsonschema.validate(json.loads(done.out), SCHEMA)
    document = json.loads(
        llmcli("run", "fake", "Which?", "-j", json.dumps(SCHEMA), "--temp", "0", "--json").out
    )
    assert document["thinking"] == "<think>Let me see.</think>"
    jsonschema.validate(json.loads(document["content"]), SCHEMA)
    assert document["constraint"]["complete"]
    assert not any(token["forced"] for token in document["tokens"][:19])
    done = llmcli("run", "fake", "Which?", "-j", json.dumps(SCHEMA), "--temp", "0", "-n", "5")
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
        (["-j", '{"type": "string", "enum": [1]}'], 1, "no document satisfies the schema"),
        (
            ["-j", '{"format": "phone"}', "--strict-schema"],
            1,
            'cannot be enforced: format "phone" at #',
        ),
        (["--strict-schema"], 2, "--strict-schema needs a schema"),
        (["--grammar", "root ::= <[5]>"], 1, "tokens in a grammar need --grammar-engine llama"),
        (
            ["--grammar", "root ::= nothing"],
            1,
            "line 1, column 10: there is no rule called nothing",
        ),
    ],
)
def test_invalid_flags_are_one_error_before_a_model_is_loaded(
    words: list[str], code: int, message: str, llmcli: Llmcli
) -> None:
    done = llmcli("run", "no-model-of-this-name", "Which?", *words)
    assert (done.code, done.out) == (code, "")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_schema_that_only_the_engine_refuses_is_an_error(llmcli: Llmcli, fake: Fake) -> None:
    fake(b"Gladly!")
    done = llmcli("run", "fake", "Which?", "-j", '{"items": {"type": "text"}}')
    assert done.code == 1
    assert done.err.startswith('error: the schema cannot be enforced: type "text" at #/items\n')


@pytest.mark.parametrize(
    "settings",
    [{"temp": 0}, {"seed": 3}, {"mirostat": 2}, {"xtc_probability": 0.5, "typical": 0.5}],
    ids=str,
)
def test_the_answers_of_a_real_model_match_the_schema(
    settings: dict[str, float], stories_gguf: Path
) -> None:
    schema = {
        **SCHEMA,
        "properties": {**SCHEMA["properties"], "note": {"type": "string", "maxLength": 12}},
    }  # type: ignore[dict-item]
    constraint = Constraint(
        "json_schema", json.dumps({**schema, "required": ["radius", "unit", "note"]})
    )
    with open_runner(stories_gguf, RunOptions(ctx_size=256, threads=1), raw=True) as runner:
        request = Request(
            runner.encode_text("Once upon a time"),
            default_sampling().with_values(settings),
            128,
            strategy="guided",
            grammar=runner.grammars(constraint),
            logprobs=True,
        )
        reply = runner.reply(request)
        list(reply)
        runner.engine.ledger.check()
    jsonschema.validate(json.loads(reply.answer.text), json.loads(constraint.text))
    assert any(token.forced for token in reply.answer.tokens)
