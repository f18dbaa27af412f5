"""The template check on the two mistakes of shared GGUFs."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from llmcli.errors import UserError
from llmcli.runtime.text.template_check import template_report

TURNS = "{% for m in messages %}<s{{ m.role }}>{{ m.content }}{end}{% endfor %}"


def vocabulary(path: Path, template: str | None, *, add_bos: bool = True) -> Path:
    """A file with a SentencePiece vocabulary of bytes and three specials, and a template."""
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


def test_a_sound_template_passes(tmp_path):
    report = template_report(vocabulary(tmp_path / "a.gguf", TURNS.replace("{end}", "</s>")))
    assert report.warnings == ()
    assert report.probes["one question"] == "<suser>What colour is the sky?</s>"


def test_a_bos_that_would_come_twice_is_told(tmp_path):
    twice = "{{ bos_token }}" + TURNS.replace("{end}", "</s>")
    (warning,) = template_report(vocabulary(tmp_path / "a.gguf", twice)).warnings
    assert "doubled BOS" in warning
    assert template_report(vocabulary(tmp_path / "b.gguf", twice, add_bos=False)).warnings == ()


def test_a_turn_that_ends_where_generation_would_not_stop_is_told(tmp_path):
    (warning,) = template_report(
        vocabulary(tmp_path / "a.gguf", TURNS.replace("{end}", "[turn]"))
    ).warnings
    assert "[turn]" in warning
    assert "not stop" in warning


def test_a_template_that_hides_the_answer_is_told(tmp_path):
    (warning,) = template_report(
        vocabulary(tmp_path / "a.gguf", "{{ messages[0].content }}")
    ).warnings
    assert "answer" in warning


def test_a_base_model_and_a_raising_template_are_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="no chat template"):
        template_report(vocabulary(tmp_path / "a.gguf", None))
    with pytest.raises(UserError, match="never"):
        template_report(vocabulary(tmp_path / "b.gguf", "{{ raise_exception('never') }}"))


@pytest.mark.model
def test_the_default_model_passes(smollm2):
    assert template_report(smollm2).warnings == ()


def test_a_turn_that_the_next_one_ends_passes(tmp_path):
    ends = "{% for m in messages %}{% if m.role == 'user' %}</s>{% endif %}{{ m.role }}{{ m.content }}{% endfor %}"
    assert template_report(vocabulary(tmp_path / "a.gguf", ends)).warnings == ()
    (warning,) = template_report(vocabulary(tmp_path / "b.gguf", ends.replace("</s>", ""))).warnings
    assert "no end-of-generation token" in warning
