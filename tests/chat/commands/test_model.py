"""/model with fakes: which settings stay, which are filled in, and the state after a failure."""

from collections.abc import Callable
from typing import Any

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.errors import UserError
from llmcli.model_loader.opened_model import OpenedModel
from tests.chat.terminal.test_completion import offered
from tests.fixtures.fakes import fake_runner

Make = Callable[..., ChatSession]


class Shelf:
    """Models to be had by name; remembers what was closed."""

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


def other(
    *, settings: dict[str, Any] | None = None, system: str | None = None, **more: Any
) -> Shelf:
    return Shelf(other=OpenedModel("other", fake_runner(b"no", **more), 7, system, settings or {}))


def test_another_model_goes_on_with_the_conversation_and_computes_it_anew(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    one.conversation.sampling = one.conversation.sampling.with_values({"top_k": 7})
    one.ask("a?", StreamWriter(silent=True))
    one.models = other(template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    run_command(one, "/model other")
    assert capsys.readouterr().out == "other · F32 · 256 tokens of context\n"
    answer = one.ask("b?", StreamWriter(silent=True))
    assert (answer.text, answer.cached_tokens) == ("no", 0)
    held = bytes(token for token in one.runner.engine.ledger.tokens[0] if token < 256)
    assert held.startswith(b"[user]a?[assistant]yes[user]b?")
    assert [m.content for m in one.conversation.messages] == ["a?", "yes", "b?", "no"]
    assert (one.name, one.file_bytes, one.conversation.sampling["top_k"]) == ("other", 7, 7)
    one.runner.engine.ledger.check()


def test_a_model_that_cannot_be_had_leaves_the_old_one_answering(talk: Make) -> None:
    one = talk(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    before, one.models = one.runner, other()
    with pytest.raises(UserError, match="no model called 'nobody'"):
        run_command(one, "/model nobody")
    assert one.runner is before
    assert one.ask("b?", StreamWriter(silent=True)).cached_tokens > 0


def test_what_a_name_brings_along_fills_in_what_was_not_set(talk: Make) -> None:
    one = talk()
    one.conversation.sampling = one.conversation.sampling.with_values({"top_k": 7})
    one.models = other(
        settings={"top_k": 9, "temperature": 1.5, "top_p": 0.5}, system="Speak Latin."
    )
    run_command(one, "/model other")
    assert [one.conversation.sampling[name] for name in ("top_k", "temp", "top_p")] == [7, 0, 0.5]
    assert one.conversation.system == "Speak Latin."


def test_wrong_settings_of_a_name_change_nothing(talk: Make) -> None:
    one = talk()
    before = one.runner, one.conversation.sampling
    one.models = other(settings={"top_p": 5}, system="Speak Latin.")
    with pytest.raises(UserError, match="top_p"):
        run_command(one, "/model other")
    assert (one.runner, one.conversation.sampling, one.name, one.conversation.system) == (
        *before,
        "fake",
        None,
    )
    assert one.models.closed == 0


def test_token_ids_of_the_other_vocabulary_do_not_stay(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    one.conversation.sampling = one.conversation.sampling.with_values({"logit_bias": "104-inf"})
    one.models = other()
    run_command(one, "/model other")
    assert "logit_bias was reset" in capsys.readouterr().err
    assert one.conversation.sampling["logit_bias"] == ()


def test_a_conversation_too_long_for_the_new_context_is_told(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    one.ask("x" * 100, StreamWriter(silent=True))
    one.models = other(n_ctx=64)
    run_command(one, "/model other")
    assert "this context holds 64" in capsys.readouterr().err


def test_alone_it_tells_which_model_answers_and_tab_offers_the_others(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    one.models = other()
    run_command(one, "/model")
    assert capsys.readouterr().out == "fake (fake.gguf)\n"
    assert offered(one, "/model ot") == ["/model other"]
    with pytest.raises(UserError, match="cannot be changed here"):
        run_command(talk(), "/model other")
