"""/model with fake models: which settings change, and what stays after a failure."""

from collections.abc import Callable
from typing import Any

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import OpenedModel
from tests.chat.terminal.test_completion import completed_lines
from tests.fixtures.fakes import fake_runner

MakeChat = Callable[..., ChatSession]


class FakeModels:
    """ModelChoices with fake models by name. `closed`: how many models were closed."""

    def __init__(self, **models: OpenedModel) -> None:
        self.models, self.closed, self.beams = models, 0, 0

    def list_names(self) -> list[str]:
        return sorted(self.models)

    def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
        if ref not in self.models:
            raise UserError(f"no model called {ref!r}", hint="there is other")
        self.beams = beams
        use(self.models[ref])
        self.closed += 1


def other_model(
    *, settings: dict[str, Any] | None = None, system: str | None = None, **more: Any
) -> FakeModels:
    return FakeModels(
        other=OpenedModel("other", fake_runner(b"no", **more), 7, system, settings or {})
    )


def test_another_model_continues_the_conversation_and_recomputes_it(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    chat.conversation.sampling = chat.conversation.sampling.with_values({"top_k": 7})
    chat.ask("a?", StreamWriter(silent=True))
    chat.models = other_model(
        template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    run_command(chat, "/model other")
    assert capsys.readouterr().out == "other · F32 · 256 tokens of context\n"
    answer = chat.ask("b?", StreamWriter(silent=True))
    assert (answer.text, answer.cached_tokens) == ("no", 0)
    cached = bytes(token for token in chat.runner.engine.ledger.tokens[0] if token < 256)
    assert cached.startswith(b"[user]a?[assistant]yes[user]b?")
    assert [m.content for m in chat.conversation.messages] == ["a?", "yes", "b?", "no"]
    assert (chat.name, chat.file_bytes, chat.conversation.sampling["top_k"]) == ("other", 7, 7)
    chat.runner.engine.ledger.check()


def test_the_old_model_stays_if_the_new_one_cannot_be_opened(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    runner, chat.models = chat.runner, other_model()
    with pytest.raises(UserError, match="no model called 'nobody'"):
        run_command(chat, "/model nobody")
    assert chat.runner is runner
    assert chat.ask("b?", StreamWriter(silent=True)).cached_tokens > 0


def test_settings_of_the_new_model_apply_only_to_unchanged_settings(make_chat: MakeChat) -> None:
    chat = make_chat()
    chat.conversation.sampling = chat.conversation.sampling.with_values({"top_k": 7})
    chat.models = other_model(
        settings={"top_k": 9, "temperature": 1.5, "top_p": 0.5}, system="Speak Latin."
    )
    run_command(chat, "/model other")
    assert [chat.conversation.sampling[name] for name in ("top_k", "temp", "top_p")] == [7, 0, 0.5]
    assert chat.conversation.system == "Speak Latin."


def test_invalid_settings_of_the_new_model_change_nothing(make_chat: MakeChat) -> None:
    chat = make_chat()
    runner = chat.runner, chat.conversation.sampling
    chat.models = other_model(settings={"top_p": 5}, system="Speak Latin.")
    with pytest.raises(UserError, match="top_p"):
        run_command(chat, "/model other")
    assert (chat.runner, chat.conversation.sampling, chat.name, chat.conversation.system) == (
        *runner,
        "fake",
        None,
    )
    assert chat.models.closed == 0


def test_logit_bias_is_reset_for_another_model(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    chat.conversation.sampling = chat.conversation.sampling.with_values({"logit_bias": "104-inf"})
    chat.models = other_model()
    run_command(chat, "/model other")
    assert "logit_bias was reset" in capsys.readouterr().err
    assert chat.conversation.sampling["logit_bias"] == ()


def test_a_conversation_too_long_for_the_new_context_prints_a_warning(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    chat.ask("x" * 100, StreamWriter(silent=True))
    chat.models = other_model(n_ctx=64)
    run_command(chat, "/model other")
    assert "this context holds 64" in capsys.readouterr().err


def test_model_without_an_argument_prints_the_model_and_tab_offers_the_others(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    chat.models = other_model()
    run_command(chat, "/model")
    assert capsys.readouterr().out == "fake (fake.gguf)\n"
    assert completed_lines(chat, "/model ot") == ["/model other"]
    with pytest.raises(UserError, match="cannot be changed here"):
        run_command(make_chat(), "/model other")
