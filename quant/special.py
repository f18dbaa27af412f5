"""Ids of special tokens, what ends an answer, and what is put around a text, from a checkpoint's
settings.

llama.cpp has three slots for ends of generation and knows others by their text. It knows rows and
settings, not where they come from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quant.errors import Refusal
from quant.structure import flat

# Texts that end generation in llama.cpp whatever the file says (src/llama-vocab.cpp): they need no
# slot.
ENDS = frozenset(
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
LLAMAS = ("LlamaTokenizer", "LlamaTokenizerFast")
SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
}

Json = Mapping[str, Any]


def ids(
    texts: Sequence[str], settings: Json, generation: Json, config: Json, where: str
) -> dict[str, int]:
    """The key's name -> id of every special token that the settings name; `texts` are the
    vocabulary's rows.
    """
    by_text = {text: index for index, text in reversed(list(enumerate(texts)))}
    found: dict[str, int] = {}
    for name in SPECIAL:
        value = settings.get(f"{name}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in by_text:
            found[name] = by_text[text]
    for name in ("bos", "pad"):
        value = config.get(f"{name}_token_id")
        if name not in found and type(value) is int and 0 <= value < len(texts):
            found[name] = value
    ends = _ends(generation, config, len(texts))
    if ends and found.get("eos") not in ends:
        found["eos"] = ends[0]
    loose = [index for index in ends if index != found.get("eos") and not _known(texts, index)]
    if len(loose) > 2:
        told = ", ".join(repr(texts[index]) for index in loose)
        raise Refusal(
            f"{where} ends answers with {told}: a GGUF file has room for two such tokens",
            hint="shorten eos_token_id in generation_config.json",
        )
    return {SPECIAL[name]: index for name, index in found.items()} | dict(
        zip(("eot", "eom"), loose, strict=False)
    )


def _known(texts: Sequence[str], index: int) -> bool:
    """Whether llama.cpp takes a token for an end by its text; it has exceptions of its own."""
    text = texts[index]
    if text == "<|end|>":  # the end of a message, not of the answer, beside these
        beside = {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}.intersection(texts)
        return not (
            beside >= {"<|return|>", "<|call|>"} or ("<|flush|>" in beside and len(beside) > 1)
        )
    if text == "</s>" and not {"<|tool_response>", "<|plamo:eos|>"}.isdisjoint(texts):
        return False
    return text in ENDS


def _ends(generation: Json, config: Json, size: int) -> list[int]:
    """Ids that end generation: generation_config's list or number, else config's."""
    for values in (generation, config):
        value = values.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        good = [index for index in listed if type(index) is int and 0 <= index < size]
        if good:
            return list(dict.fromkeys(good))
    return []


def around(tokenizer: Json, settings: Json, pieces: bool) -> tuple[bool, bool, list[str]]:
    """Whether text gets a BOS in front and an EOS behind, and what the user should know.

    transformers takes it from tokenizer.json alone where there is one; without, the settings say
    it, and pieces of SentencePiece get a BOS unless they say no. Where tokenizer.json is silent,
    the settings count for Llama's classes, as in transformers 4: DeepSeek's models were made and
    are served that way.
    """
    said = [settings.get(f"add_{name}_token") for name in ("bos", "eos")]
    if not tokenizer:
        return (pieces if said[0] is None else bool(said[0])), bool(said[1]), []
    first, last = _around(tokenizer.get("post_processor"))
    if (
        settings.get("tokenizer_class") in LLAMAS
        and _silent(tokenizer.get("post_processor"))
        and True in said
    ):
        note = "tokenizer_config.json says what is put around a text, as in transformers 4; transformers 5 puts nothing"
        return said[0] is True, said[1] is True, [note]
    told = zip(("bos", "eos"), said, (first, last), strict=True)
    notes = [
        f"tokenizer_config.json has add_{name}_token {str(says).lower()}; tokenizer.json, and with it transformers, "
        "does otherwise: the file follows it"
        for name, says, does in told
        if says not in (None, does)
    ]
    return first, last, notes


def _silent(node: Any) -> bool:
    """Whether a post-processor says nothing of special tokens."""
    parts = (part for part in flat(node, "processors") if part is not None)
    return all(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)


def _around(node: Any) -> tuple[bool, bool]:
    """Whether a post-processor puts a special token first and last around a single text."""
    first = last = False
    for part in flat(node, "processors"):
        match part:
            case {"type": "TemplateProcessing", "single": [{**head}, *_, {**tail}]}:
                first, last = first or "SpecialToken" in head, last or "SpecialToken" in tail
    return first, last
