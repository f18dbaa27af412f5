"""End-of-answer tokens: the file's three slots, and the texts that llama.cpp recognizes."""

import pytest

from quant.errors import UserError
from quant.tokenizer import special_tokens


def slots(texts: list[str], ends: list[int]) -> dict[str, int]:
    return special_tokens.find_special_ids(
        texts, {"eos_token": "</s>"}, {"eos_token_id": ends}, {}, "here"
    )


@pytest.mark.parametrize(
    ("texts", "ends", "expected"),
    [
        (["</s>", "<|im_end|>", "<x>"], [0, 1], {"eos": 0}),
        (["</s>", "<|im_end|>", "<x>"], [2, 1, 0], {"eos": 0, "eot": 2}),
        (["</s>", "<|end|>", "<|return|>", "<|call|>"], [2, 1, 3], {"eos": 2, "eot": 1}),
        (["</s>", "<|end|>", "<|call|>"], [2, 1], {"eos": 2}),
        (["</s>", "<|tool_response>", "<turn|>"], [1, 0, 2], {"eos": 0}),
        (["</s>", "<|tool_response>", "<turn|>"], [1, 2], {"eos": 1}),
        (["</s>", "<a>", "<b>"], [1, 1, 2, 99, True], {"eos": 1, "eot": 2}),
    ],
)
def test_each_end_has_a_slot_or_is_known_by_its_text(texts, ends, expected) -> None:
    assert slots(texts, ends) == expected


def test_more_ends_than_slots_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'<a>', '<b>', '<c>'"):
        slots(["</s>", "<a>", "<b>", "<c>"], [0, 1, 2, 3])


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
}


@pytest.mark.parametrize(
    "silent", [BYTES, None, {"type": "Sequence", "processors": [BYTES, BYTES]}]
)
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_deepseek_gets_the_bos_that_its_settings_ask_for(silent, kind: str) -> None:
    """tokenizer_config.json of DeepSeek V2, V3, R1 and its distillates, whose tokenizer.json has no
    template.
    """
    settings = {"tokenizer_class": kind, "add_bos_token": True, "add_eos_token": False}
    first, last, notes = special_tokens.find_surrounding_tokens(
        {"post_processor": silent}, settings, is_sentencepiece=False
    )
    assert (first, last, len(notes)) == (True, False, 1)


@pytest.mark.parametrize(
    ("post", "settings"),
    [
        (TEMPLATE, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
        (BYTES, {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}),
        (BYTES, {"tokenizer_class": "LlamaTokenizerFast"}),
        (BYTES, {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}),
        (BYTES, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
        (BYTES, {"tokenizer_class": ["LlamaTokenizer"], "add_bos_token": True}),
    ],
)
def test_others_get_what_tokenizer_json_says(post, settings) -> None:
    assert special_tokens.find_surrounding_tokens(
        {"post_processor": post}, settings, is_sentencepiece=False
    )[:2] == (
        False,
        False,
    )
