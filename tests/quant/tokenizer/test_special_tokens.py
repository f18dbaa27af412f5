"""End-of-generation tokens: the keys of GGUF for them, and the texts that llama.cpp recognizes."""

import json
from pathlib import Path

import gguf
import pytest

from quant.tokenizer import special_tokens


def find_ids(texts: list[str], ends: list[int]) -> dict[str, int]:
    ids, notes = special_tokens.find_special_ids(
        texts, {"eos_token": "</s>"}, {"eos_token_id": ends}, {}
    )
    assert not notes
    return ids


@pytest.mark.parametrize(
    ("texts", "ends", "expected"),
    [
        (["</s>", "<|im_end|>", "<x>"], [0, 1], {"eos": 0}),
        (["</s>", "<|im_end|>", "<x>"], [2, 1, 0], {"eos": 0, "eot": 2}),
        (["</s>", "<|end|>", "<|return|>", "<|call|>"], [2, 1, 3], {"eos": 0, "eot": 1}),
        (["</s>", "<|end|>", "<|call|>"], [2, 1], {"eos": 0}),
        (["</s>", "<|tool_response>", "<turn|>"], [1, 0, 2], {"eos": 0}),
        (["</s>", "<|tool_response>", "<turn|>"], [1, 2], {"eos": 0}),
        (["</s>", "<a>", "<b>"], [1, 1, 2, 99, True], {"eos": 0, "eot": 1, "eom": 2}),
        (["<s>", "<a>", "<b>"], [1, 2], {"eos": 1, "eot": 2}),
        # llama.cpp recognizes </s>, so that its slot is free for one of three other tokens
        (["</s>", "<a>", "<b>", "<c>"], [1, 2, 3], {"eos": 1, "eot": 2, "eom": 3}),
        (["</s>", "<|im_end|>", "<a>", "<b>", "<c>"], [1, 2, 3, 4], {"eos": 2, "eot": 3, "eom": 4}),
    ],
)
def test_each_end_token_has_a_slot_or_a_known_text(texts, ends, expected) -> None:
    assert find_ids(texts, ends) == expected


@pytest.mark.parametrize("end", [None, 1, 2, [1, 2]])
@pytest.mark.parametrize("eos", ["</turn>", "</s>", {"content": "</turn>"}, None, "<unknown>"])
def test_eos_is_that_of_the_gguf_package(end: object, eos: object, tmp_path: Path) -> None:
    texts = ["<s>", "</s>", "<a>", "</turn>"]
    settings, config = {"eos_token": eos}, {"eos_token_id": end}
    added = [{"id": index, "content": text} for index, text in enumerate(texts)]
    for name, document in (
        ("tokenizer.json", {"added_tokens": added}),
        ("tokenizer_config.json", settings),
        ("config.json", config),
    ):
        (tmp_path / name).write_text(json.dumps(document))
    expected = gguf.SpecialVocab(tmp_path, n_vocab=len(texts)).special_token_ids.get("eos")
    ours = special_tokens.find_special_ids(texts, settings, {}, config)[0].get("eos")
    if isinstance(end, list) and expected is None:
        expected = end[0]  # the package does not read lists
    assert ours == expected


def test_end_tokens_beyond_the_slots_are_named_in_a_note() -> None:
    texts = ["</turn>", "<a>", "<b>", "<c>", "<d>"]
    settings, generation = {"eos_token": "</turn>"}, {"eos_token_id": [1, 2, 3, 4]}
    ids, notes = special_tokens.find_special_ids(texts, settings, generation, {})
    assert ids == {"eos": 0, "eot": 1, "eom": 2}
    assert len(notes) == 1
    assert notes[0].startswith("'<c>', '<d>' will not end an answer")


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
}


@pytest.mark.parametrize(
    "post_processor", [BYTES, None, {"type": "Sequence", "processors": [BYTES, BYTES]}]
)
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_deepseek_gets_the_bos_of_its_settings(post_processor, kind: str) -> None:
    """DeepSeek V2, V3, R1 and its distilled models add BOS by their tokenizer_config.json. Their
    tokenizer.json has no template.
    """
    settings = {"tokenizer_class": kind, "add_bos_token": True, "add_eos_token": False}
    first, last, notes = special_tokens.find_surrounding_tokens(
        {"post_processor": post_processor}, settings, is_sentencepiece=False
    )
    assert (first, last, len(notes)) == (True, False, 1)


@pytest.mark.parametrize(
    ("post_processor", "settings"),
    [
        (TEMPLATE, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
        (BYTES, {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}),
        (BYTES, {"tokenizer_class": "LlamaTokenizerFast"}),
        (BYTES, {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}),
        (BYTES, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
        (BYTES, {"tokenizer_class": ["LlamaTokenizer"], "add_bos_token": True}),
    ],
)
def test_other_tokenizers_follow_tokenizer_json(post_processor, settings) -> None:
    assert special_tokens.find_surrounding_tokens(
        {"post_processor": post_processor}, settings, is_sentencepiece=False
    )[:2] == (
        False,
        False,
    )
