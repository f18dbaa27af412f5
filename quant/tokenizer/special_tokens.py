"""Special tokens from a checkpoint's settings: their ids, which tokens end an answer, and which
tokens are added before and after a text.

A GGUF file can name three tokens that end an answer (eos, eot and eom). llama.cpp recognizes
further ones by their text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quant.tokenizer.json_nodes import flatten_sequence

# Texts of tokens that end generation in llama.cpp even if the file does not name them
# (src/llama-vocab.cpp).
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
SPECIAL_KEYS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
}

Json = Mapping[str, Any]


def find_special_ids(
    texts: Sequence[str], settings: Json, generation: Json, config: Json
) -> tuple[dict[str, int], list[str]]:
    """Return key name ("bos", "eos", "unknown", ...) -> id for every special token that the
    settings name, and notes for the user. Tokens that end an answer and that llama.cpp does not
    recognize by their text are returned as "eot" and "eom". If there are more than these two, a
    note names the others: they do not end answers.

    `texts` are the texts of the vocabulary's rows. `settings`, `generation` and `config` are the
    contents of tokenizer_config.json, generation_config.json and config.json.
    """
    by_text = {text: index for index, text in reversed(list(enumerate(texts)))}
    special_ids: dict[str, int] = {}
    for name in SPECIAL_KEYS:
        value = settings.get(f"{name}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in by_text:
            special_ids[name] = by_text[text]
    for name in ("bos", "pad"):
        value = config.get(f"{name}_token_id")
        if name not in special_ids and type(value) is int and 0 <= value < len(texts):
            special_ids[name] = value
    ends = _end_ids(generation, config, len(texts))
    # As in gguf.SpecialVocab, the tokenizer's own eos comes first: a finetune may end its turns with
    # a new token, and keep the generation_config.json of its base.
    eos = special_ids.get("eos")
    unrecognized = [i for i in ends if i != eos and not _is_recognized(texts, i)]
    if ends and eos is None:
        special_ids["eos"] = ends[0]
    elif (
        eos is not None
        and eos not in ends
        and len(unrecognized) == 3
        and _is_recognized(texts, eos)
    ):
        special_ids["eos"] = unrecognized[0]  # llama.cpp also ends at the replaced one
    unrecognized = [i for i in unrecognized if i != special_ids.get("eos")]
    notes = []
    if others := unrecognized[2:]:
        listed = ", ".join(repr(texts[index]) for index in others)
        notes.append(
            f"{listed} will not end an answer, although generation_config.json says so: a GGUF "
            "file can name only two such tokens besides eos; add --reverse-prompt TEXT to stop "
            "there"
        )
    keys = {SPECIAL_KEYS[name]: index for name, index in special_ids.items()}
    return keys | dict(zip(("eot", "eom"), unrecognized, strict=False)), notes


def _is_recognized(texts: Sequence[str], index: int) -> bool:
    """Return whether llama.cpp recognizes by its text that token `index` ends an answer. llama.cpp
    makes exceptions for some vocabularies.
    """
    text = texts[index]
    # In a vocabulary with the tokens below, <|end|> ends a message but not the answer.
    if text == "<|end|>":
        companions = {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}.intersection(texts)
        return not (
            companions >= {"<|return|>", "<|call|>"}
            or ("<|flush|>" in companions and len(companions) > 1)
        )
    if text == "</s>" and not {"<|tool_response>", "<|plamo:eos|>"}.isdisjoint(texts):
        return False
    return text in END_TEXTS


def _end_ids(generation: Json, config: Json, size: int) -> list[int]:
    """Return the ids of the tokens that end an answer, from generation_config.json or else from
    config.json. `size` is the number of rows in the vocabulary.
    """
    for values in (generation, config):
        value = values.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        valid = [index for index in listed if type(index) is int and 0 <= index < size]
        if valid:
            return list(dict.fromkeys(valid))
    return []


def find_surrounding_tokens(
    tokenizer: Json, settings: Json, is_sentencepiece: bool
) -> tuple[bool, bool, list[str]]:
    """Return whether a BOS is added before a text, whether an EOS is added after it, and notes for
    the user. `tokenizer` and `settings` are the contents of tokenizer.json and
    tokenizer_config.json.

    As in transformers, tokenizer.json decides if there is one. Without it, the settings decide, and
    SentencePiece models get a BOS unless the settings say no. There is an exception: if
    tokenizer.json adds no tokens and the tokenizer has one of Llama's classes, the settings decide,
    as in transformers 4. DeepSeek's models need this, because they were trained with these tokens.
    """
    flags = [settings.get(f"add_{name}_token") for name in ("bos", "eos")]
    if not tokenizer:
        return (is_sentencepiece if flags[0] is None else bool(flags[0])), bool(flags[1]), []
    adds_bos, adds_eos = _template_ends(tokenizer.get("post_processor"))
    if (
        settings.get("tokenizer_class") in LLAMA_CLASSES
        and _adds_nothing(tokenizer.get("post_processor"))
        and True in flags
    ):
        note = (
            "tokenizer_config.json decides which tokens are added around a text, as in "
            "transformers 4; transformers 5 adds none"
        )
        return flags[0] is True, flags[1] is True, [note]
    decisions = zip(("bos", "eos"), flags, (adds_bos, adds_eos), strict=True)
    notes = [
        f"tokenizer_config.json has add_{name}_token {str(setting).lower()}, but tokenizer.json "
        "does otherwise: the file follows tokenizer.json, as transformers does"
        for name, setting, is_added in decisions
        if setting not in (None, is_added)
    ]
    return adds_bos, adds_eos, notes


def count_separators(tokenizer: Json) -> int:
    """Return the number of special tokens that a tokenizer.json puts between two texts."""
    count = 0
    for step in flatten_sequence(tokenizer.get("post_processor"), "processors"):
        match step:
            case {"type": "TemplateProcessing", "pair": [*parts]}:
                places = [
                    index
                    for index, part in enumerate(parts)
                    if isinstance(part, dict) and "Sequence" in part
                ]
                if len(places) == 2:
                    count = places[1] - places[0] - 1
            case {"type": "BertProcessing"}:
                count = 1
            case {"type": "RobertaProcessing"}:
                count = 2
    return count


def _adds_nothing(node: Any) -> bool:
    """Return whether a post-processor node of tokenizer.json adds no special tokens."""
    steps = (step for step in flatten_sequence(node, "processors") if step is not None)
    return all(isinstance(step, dict) and step.get("type") == "ByteLevel" for step in steps)


def _template_ends(node: Any) -> tuple[bool, bool]:
    """Return whether a post-processor node of tokenizer.json adds a special token before a single
    text, and whether it adds one after it.
    """
    adds_first = adds_last = False
    for step in flatten_sequence(node, "processors"):
        match step:
            case {"type": "TemplateProcessing", "single": [{**head}, *_, {**tail}]}:
                adds_first, adds_last = (
                    adds_first or "SpecialToken" in head,
                    adds_last or "SpecialToken" in tail,
                )
            case {"type": "BertProcessing" | "RobertaProcessing"}:
                adds_first = adds_last = True
    return adds_first, adds_last
