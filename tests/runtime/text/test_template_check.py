"""The check of a file's chat template against its vocabulary."""

from pathlib import Path

import gguf
import pytest

from llmcli.errors import UserError
from llmcli.runtime.text.template_check import template_report
from tests.fixtures.vocabularies import write_vocabulary

TEMPLATE = "{% for m in messages %}<s{{ m.role }}>{{ m.content }}{end}{% endfor %}"


def write_model(path: Path, template: str | None, *, add_bos: bool = True) -> Path:
    """Write a vocabulary with a chat template, and return its path."""
    return write_vocabulary(
        path, "[turn]", gguf.TokenType.CONTROL, template=template, add_bos=add_bos
    )


def test_good_template_has_no_warnings(tmp_path):
    report = template_report(write_model(tmp_path / "a.gguf", TEMPLATE.replace("{end}", "</s>")))
    assert report.warnings == ()
    assert report.probes["one question"] == "<suser>What colour is the sky?</s>"


def test_warning_if_template_and_tokenizer_both_write_bos(tmp_path):
    template = "{{ bos_token }}" + TEMPLATE.replace("{end}", "</s>")
    (warning,) = template_report(write_model(tmp_path / "a.gguf", template)).warnings
    assert "doubled BOS" in warning
    assert template_report(write_model(tmp_path / "b.gguf", template, add_bos=False)).warnings == ()


def test_warning_if_generation_would_not_stop_at_the_end_of_an_answer(tmp_path):
    (warning,) = template_report(
        write_model(tmp_path / "a.gguf", TEMPLATE.replace("{end}", "[turn]"))
    ).warnings
    assert "[turn]" in warning
    assert "not stop" in warning


def test_warning_if_the_template_leaves_out_the_answer(tmp_path):
    turn, answer = template_report(
        write_model(tmp_path / "a.gguf", "{{ messages[0].content }}")
    ).warnings
    assert turn.startswith("a second turn: the chat template leaves out message 2")
    assert "leaves out the assistant's answer" in answer


def test_error_for_a_base_model_and_for_a_template_that_fails(tmp_path):
    with pytest.raises(UserError, match="no chat template"):
        template_report(write_model(tmp_path / "a.gguf", None))
    with pytest.raises(UserError, match="never"):
        template_report(write_model(tmp_path / "b.gguf", "{{ raise_exception('never') }}"))


@pytest.mark.model
def test_default_model_has_no_warnings(smollm2):
    assert template_report(smollm2).warnings == ()


def test_end_token_that_the_next_message_writes_is_found(tmp_path):
    ends = "{% for m in messages %}{% if m.role == 'user' %}</s>{% endif %}{{ m.role }}{{ m.content }}{% endfor %}"
    assert template_report(write_model(tmp_path / "a.gguf", ends)).warnings == ()
    (warning,) = template_report(
        write_model(tmp_path / "b.gguf", ends.replace("</s>", ""))
    ).warnings
    assert "no end-of-generation token" in warning
