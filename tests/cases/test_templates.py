"""Chat templates that expect conversations in other forms than clients send them, or that show only
a part of one.

A line of cases.jsonl is a template, a request or the name of a file with one, and the prompt or the
error.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from llmcli.api.bodies.checks import read_body
from llmcli.api.conversation.conversation_text import render_conversation
from llmcli.api.conversation.messages import to_conversation
from llmcli.api.forms.conversation_form import ChatBody, apply_template
from llmcli.api.server_settings import ServerSettings
from llmcli.errors import UserError
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.runner import open_template
from llmcli.runtime.text.prompt_tokens import tokenize_prompt
from quant.model_file.read_header import read_header
from tests.fixtures.cli import Done
from tests.fixtures.fakes import fake_runner

Llmcli = Callable[..., Done]
FOLDER = Path(__file__).parent / "templates"
CASES = [json.loads(line) for line in (FOLDER / "cases.jsonl").read_text().splitlines()]
SETTINGS = ServerSettings(("tiny",))


def read_template(name: str) -> str:
    """Return a template of the cases."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def read_request(case: dict[str, Any]) -> dict[str, Any]:
    """Return the request of a case."""
    request = case["request"]
    body: dict[str, Any] = (
        json.loads((FOLDER / request).read_text()) if isinstance(request, str) else request
    )
    return body


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_prompt_has_all_texts_of_the_request_or_is_refused(case: dict[str, Any]) -> None:
    runner = fake_runner(template=read_template(case["template"]))
    if "error" in case:
        with pytest.raises(UserError) as refused:
            apply_template(read_request(case), runner, SETTINGS)
        assert str(refused.value) == case["error"]
    else:
        assert apply_template(read_request(case), runner, SETTINGS) == case["prompt"]


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(FOLDER.glob("*.jinja")) if path.stem != "clock"]
)
def test_prompt_is_that_of_transformers_where_transformers_shows_everything(name: str) -> None:
    """One message, a system text, several turns, functions, and calls with results."""
    user, answer = {"role": "user", "content": "User1"}, {"role": "assistant", "content": "Answer1"}
    system, more = {"role": "system", "content": "System1"}, {"role": "user", "content": "User2"}
    history = json.loads((FOLDER / "chat_tool_history.json").read_text())
    (call,) = history["messages"][1]["tool_calls"]
    call["function"]["arguments"] = {"city": "Paris"}  # as transformers expects it
    compared = 0
    for messages, tools in (
        ([user], None),
        ([system, user], None),
        ([user, answer, more], None),
        ([user], history["tools"]),
        (history["messages"], history["tools"]),
    ):
        words = [message["content"] for message in messages if message["content"]]
        words += ["weather"] if tools else []
        words += ["Paris"] if messages is history["messages"] else []
        source = read_template(name)
        try:
            ((expected,), _) = render_jinja_template(
                [messages],
                chat_template=source.removeprefix("\ufeff"),
                tools=tools,
                add_generation_prompt=True,
                bos_token="",
            )
        except (TypeError, jinja2.TemplateError):
            continue
        if any(word not in expected for word in words):
            continue
        request = json.dumps({"messages": messages, "tools": tools})
        request = request.replace('{"city": "Paris"}', json.dumps('{"city": "Paris"}'))
        runner = fake_runner(template=source)
        assert apply_template(json.loads(request), runner, SETTINGS) == expected
        compared += 1
    assert compared or name in ("drops_content", "typed_only")


def test_template_with_a_clock_shows_the_time() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = apply_template(body, fake_runner(template=read_template("clock")), SETTINGS)
    first, second, third = prompt.splitlines()
    assert first.startswith("Now: 20")
    assert (second, third) == ("user: Hi", "assistant:")


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("typed_only", 0, ""),
        ("bom", 0, ""),
        ("ns_items", 0, ""),
        (
            "drops_content",
            1,
            "error: the chat template leaves out message 1 (user)\nhint: use --raw",
        ),
    ],
)
def test_run_answers_or_says_what_the_template_leaves_out(
    llmcli: Llmcli, stories_gguf: Path, name: str, code: int, message: str
) -> None:
    template = FOLDER / f"{name}.jinja"
    done = llmcli(
        *("run", str(stories_gguf), "Once", "--chat-template", str(template)),
        *("-n", "1", "-t", "1", "-c", "128"),
    )
    assert done.code == code, done.err
    assert message in done.err


def test_batch_answers_and_refuses_line_by_line(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "Once"}]},
        {"messages": [{"role": role, "content": "Once"} for role in ("user", "assistant", "user")]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = llmcli(
        *(
            "batch",
            str(stories_gguf),
            str(tmp_path / "in.jsonl"),
            "-o",
            str(tmp_path / "out.jsonl"),
        ),
        *("--chat-template", str(FOLDER / "last_only.jinja"), "-n", "1", "-t", "1", "-c", "256"),
    )
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["response"]["status_code"] == 200, done.err
    assert "leaves out message 1 (user)" in json.dumps(second)


@pytest.mark.model
def test_result_of_a_tool_cannot_forge_a_turn(smollm2: Path) -> None:
    body = json.loads((FOLDER / "chat_special_token_in_tool_result.json").read_text())
    messages = to_conversation(read_body(ChatBody, body, []).messages, [])
    harmless = [*messages[:-1], replace(messages[-1], content="It is about ships.")]
    with open_model(smollm2, vocab_only=True) as model:
        template = open_template(read_header(smollm2), model)
        assert template
        control_tokens = []
        for conversation in (messages, harmless):
            prompt = render_conversation(template, conversation).text
            ids = tokenize_prompt(model, prompt, model.add_bos, frozenset)
            control_tokens.append([id_ for id_ in ids if model.is_control(id_)])
            raw = b"".join(model.piece(id_, special=True) for id_ in ids)
            assert raw.decode() == prompt
            assert conversation[-1].content in prompt.plain
        assert control_tokens[0] == control_tokens[1]
