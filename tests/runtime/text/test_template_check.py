"""The check of a file's chat template against its vocabulary."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.text.template_check import template_report

TEMPLATE = "{% for m in messages %}<s{{ m.role }}>{{ m.content }}{end}{% endfor %}"


def write_vocabulary(path: Path, template: str | None, *, add_bos: bool = True) -> Path:
    """Write a GGUF with a SentencePiece vocabulary of bytes and control tokens, and a template.
    Return its path.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "[turn]", *(f"<0x{i:02X}>" for i in range(256))])
    writer.add_token_scores([0.0] * 260)
    writer.add_token_types([2, 3, 3, 3, *[6] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    if template:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((260, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_good_template_has_no_warnings(tmp_path):
    report = template_report(
        write_vocabulary(tmp_path / "a.gguf", TEMPLATE.replace("{end}", "</s>"))
    )
    assert report.warnings == ()
    assert report.probes["one question"] == "<suser>What colour is the sky?</s>"


def test_warning_if_template_and_tokenizer_both_write_bos(tmp_path):
    template = "{{ bos_token }}" + TEMPLATE.replace("{end}", "</s>")
    (warning,) = template_report(write_vocabulary(tmp_path / "a.gguf", template)).warnings
    assert "doubled BOS" in warning
    assert (
        template_report(write_vocabulary(tmp_path / "b.gguf", template, add_bos=False)).warnings
        == ()
    )


def test_warning_if_generation_would_not_stop_at_the_end_of_an_answer(tmp_path):
    (warning,) = template_report(
        write_vocabulary(tmp_path / "a.gguf", TEMPLATE.replace("{end}", "[turn]"))
    ).warnings
    assert "[turn]" in warning
    assert "not stop" in warning


def test_warning_if_the_template_leaves_out_the_answer(tmp_path):
    turn, answer = template_report(
        write_vocabulary(tmp_path / "a.gguf", "{{ messages[0].content }}")
    ).warnings
    assert turn.startswith("a second turn: the chat template leaves out message 2")
    assert "leaves out the assistant's answer" in answer


def test_error_for_a_base_model_and_for_a_template_that_fails(tmp_path):
    with pytest.raises(UserError, match="no chat template"):
        template_report(write_vocabulary(tmp_path / "a.gguf", None))
    with pytest.raises(UserError, match="never"):
        template_report(write_vocabulary(tmp_path / "b.gguf", "{{ raise_exception('never') }}"))


@pytest.mark.model
def test_default_model_has_no_warnings(smollm2):
    assert template_report(smollm2).warnings == ()


def test_end_token_that_the_next_message_writes_is_found(tmp_path):
    ends = "{% for m in messages %}{% if m.role == 'user' %}</s>{% endif %}{{ m.role }}{{ m.content }}{% endfor %}"
    assert template_report(write_vocabulary(tmp_path / "a.gguf", ends)).warnings == ()
    (warning,) = template_report(
        write_vocabulary(tmp_path / "b.gguf", ends.replace("</s>", ""))
    ).warnings
    assert "no end-of-generation token" in warning
