"""Finds out which of llama.cpp's pre-tokenizers a byte-level BPE tokenizer.json needs, by the
structure of its pre_tokenizer.

llama.cpp's converter instead hashes the ids of a probe text, which change with every added token
and every release of transformers. An unknown structure raises UserError. The choice for a known
structure is verified afterwards (quant/tokenizer/verify).
"""

from dataclasses import dataclass
from typing import Any

from quant.errors import UserError
from quant.tokenizer.json_nodes import flatten_sequence

# The steps by which text is split: names of steps ("digits", "gpt2") or regular expressions.
SplitSteps = tuple[str, ...]

# Regular expressions as they are written in tokenizer.json.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{WORDS}|\p{{N}}{{1,3}}{SYMBOLS_AND_SPACES}"
QWEN2 = rf"{WORDS}|\p{{N}}{SYMBOLS_AND_SPACES}"
NUMBERS = rf"{WORDS}|\p{{N}}+{SYMBOLS_AND_SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
UPPER_LETTERS, LOWER_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER_LETTERS}*{LOWER_LETTERS}+%s"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER_LETTERS}+{LOWER_LETTERS}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = BY_CASE % ("", "", "")
GPT4O = BY_CASE % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", "{1,3}")
NOT_HAN = r"[^\p{Han}]"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER_LETTERS[:-1]}&&{NOT_HAN}]*"
    rf"{LOWER_LETTERS[:-1]}&&{NOT_HAN}]+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER_LETTERS[:-1]}&&{NOT_HAN}]+"
    rf"{LOWER_LETTERS[:-1]}&&{NOT_HAN}]*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{SYMBOLS_AND_SPACES}"
)
KANA, CJK = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+"
ASCII_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3 = (
    ASCII_MARK
    + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    + "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
SPARK = (
    ASCII_MARK
    + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+|[\r\n]|\\s+(?!\\S)|\\s+"
)
LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-Ჺ"
    "Ჽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉ"
    "ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK = ("[\r\n]", rf"\s?[{LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
SEED = WORDS + "|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
EXAONE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPACE_RUNS = "|".join(
    [rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)]
    + [r"\s{1,2}(?!\S)", r"\s{1}"]
)
JAIS2 = rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACE_RUNS}"
DIGIT_TRIPLES = r"\d{1,3}(?=(?:\d{3})*\b)"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp.

    `whole_words_first` means that a word that is a token becomes this token directly, without
    merges (ignore_merges in tokenizer.json).
    """

    name: str
    whole_words_first: bool = False


@dataclass(frozen=True, slots=True)
class PreTokenizerMatch:
    """The choice of a pre-tokenizer. `name` becomes `tokenizer.ggml.pre`.

    If llama.cpp's own expression splits text differently from tokenizer.json, `dialect` has the
    steps that llama.cpp takes, and `difference` describes the difference to the user. With
    `is_certain`, llama.cpp is known to treat words that are tokens as tokenizer.json does;
    otherwise every word of the vocabulary must be compared.
    """

    name: str
    dialect: SplitSteps = ()
    difference: str = ""
    is_certain: bool = True


LLAMA3_PRE_TOKENIZERS = (PreTokenizer("llama-bpe", True), PreTokenizer("smaug-bpe"))
# The steps of a tokenizer.json before its byte-level step -> the pre-tokenizers of llama.cpp that
# take the same steps.
PRE_TOKENIZERS: dict[SplitSteps, tuple[PreTokenizer, ...]] = {
    ("gpt2",): (PreTokenizer("gpt-2"),),
    ("digits", "gpt2"): (PreTokenizer("smollm"),),
    (LLAMA3,): LLAMA3_PRE_TOKENIZERS,
    (POSSESSIVE % "{1,3}",): LLAMA3_PRE_TOKENIZERS,
    (QWEN2,): (PreTokenizer("qwen2"),),
    (QWEN35,): (PreTokenizer("qwen35"),),
    (POSSESSIVE % "",): (PreTokenizer("bailingmoe"),),
    (TEKKEN,): (PreTokenizer("tekken", True),),
    (GPT4O,): (PreTokenizer("gpt-4o"),),
    (KIMI,): (PreTokenizer("kimi-k2"),),
    (r"\p{N}{1,3}", KANA, DEEPSEEK3): (PreTokenizer("deepseek-v3"),),
    (r"\p{N}{1,3}", KANA, SPARK, "digits"): (PreTokenizer("spark2_5"),),
    (*DEEPSEEK, "digits"): (PreTokenizer("deepseek-llm"),),
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, "digits"): (PreTokenizer("deepseek-coder"),),
    (BLOOM,): (PreTokenizer("bloom"),),
    (BLOOM, "digits"): (PreTokenizer("viking"),),
    ("punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]"): (PreTokenizer("falcon"),),
    (r"\p{N}{1,3}", NUMBERS): (PreTokenizer("minicpm5", True),),
    (SEED,): (PreTokenizer("seed-coder"),),
    (EXAONE,): (PreTokenizer("exaone-moe"),),
    (JAIS2,): (PreTokenizer("jais-2"),),
    (DIGIT_TRIPLES, GPT4O): (PreTokenizer("tiny_aya"),),
}
# Expressions of llama.cpp that do not recognize the case of all letters. The first ones use "not a
# to z" for uppercase letters and leave out combining marks; the others do not distinguish case.
ASCII_UPPER, ASCII_LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
BY_ASCII_CASE = BY_CASE.replace(UPPER_LETTERS, ASCII_UPPER).replace(LOWER_LETTERS, ASCII_LOWER)
SYMBOLS_WITH_SLASH = SYMBOLS_AND_SPACES.replace(r"[\r\n]*", r"[\r\n/]*")
WITHOUT_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{CONTRACTIONS}?|\p{{N}}{{1,3}}{SYMBOLS_WITH_SLASH}"
)
# The ideographs of llama.cpp's unicode_cpt_is_han. \p{Han} has more characters, such as U+3005.
IDEOGRAPHS = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff"
    "\U0002f800-\U0002fa1f"
)
KIMI_WITHOUT_CASE = (
    rf"[{IDEOGRAPHS}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{IDEOGRAPHS}]]+{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{SYMBOLS_AND_SPACES}"
)
DIGIT_GROUPS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
ASCII_CASE_NOTE = "recognizes case by ASCII letters only, and no combining marks"
NO_CASE_NOTE = "ignores case, and treats combining marks differently"
KIMI_NOTE = "ignores case, and treats combining marks and some ideographs differently"
# The steps of a tokenizer.json -> the names of pre-tokenizers for which llama.cpp takes other
# steps, these other steps, and the difference in words.
DIALECTS: dict[SplitSteps, tuple[frozenset[str], SplitSteps, str]] = {
    (TEKKEN,): (frozenset({"tekken"}), (BY_ASCII_CASE % ("", "", ""),), ASCII_CASE_NOTE),
    (GPT4O,): (
        frozenset({"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}),
        (BY_ASCII_CASE % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", "{1,3}"),),
        ASCII_CASE_NOTE,
    ),
    (KIMI,): (frozenset({"kimi-k2"}), (KIMI_WITHOUT_CASE,), KIMI_NOTE),
    (DIGIT_TRIPLES, GPT4O): (
        frozenset({"tiny_aya", "cohere2moe"}),
        (DIGIT_GROUPS, WITHOUT_CASE),
        NO_CASE_NOTE,
    ),
}
# Name of a pre-tokenizer -> another name of the same expression, with which llama.cpp adds no BOS
# by default.
NAMES_WITHOUT_BOS = {"llama-bpe": "glm4", "smaug-bpe": "chatglm-bpe"}
# Names of byte-level pre-tokenizers in src/llama-vocab.cpp.
BYTE_LEVEL_NAMES = frozenset(
    {
        "a.x-4.0",
        "afmoe",
        "bailingmoe",
        "bailingmoe2",
        "bloom",
        "chameleon",
        "chatglm-bpe",
        "codeshell",
        "cohere2moe",
        "command-r",
        "dbrx",
        "deepseek-coder",
        "deepseek-llm",
        "deepseek-r1-qwen",
        "deepseek-v3",
        "default",
        "exaone",
        "exaone-moe",
        "exaone4",
        "f2llmv2",
        "falcon",
        "falcon-h1",
        "falcon3",
        "gigachat",
        "glm4",
        "glm5",
        "gpt-2",
        "gpt-4o",
        "gpt3-finnish",
        "granite-docling",
        "granite-embed-multi-97m",
        "grok-2",
        "hunyuan",
        "hunyuan-dense",
        "hy_v4",
        "jais",
        "jais-2",
        "joyai-llm",
        "kanana2",
        "kimi-k2",
        "kormo",
        "laguna",
        "lfm2",
        "llada-moe",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "llama4",
        "megrez",
        "mellum",
        "mellum2",
        "midm-2.0",
        "minerva-7b",
        "minicpm5",
        "minimax-m2",
        "mpt",
        "olmo",
        "phi-2",
        "pixtral",
        "poro-chat",
        "qwen2",
        "qwen35",
        "refact",
        "seed-coder",
        "smaug-bpe",
        "smollm",
        "solar-open",
        "spark2_5",
        "stablelm2",
        "starcoder",
        "superbpe",
        "talkie",
        "tekken",
        "tiny_aya",
        "trillion",
        "ufakzeka",
        "viking",
        "youtu",
    }
)


def find_pre_tokenizer(
    tokenizer: dict[str, Any], location: str, pre: str | None = None
) -> PreTokenizerMatch:
    """Return the choice of a pre-tokenizer for the content of a tokenizer.json: `pre` if the user
    named it, else by the structure.

    Raises UserError if llama.cpp does not know the name `pre`, or if the structure is unknown; the
    message names `location`.
    """
    if pre is not None and pre not in BYTE_LEVEL_NAMES:
        raise UserError(
            f"llama.cpp has no pre-tokenizer {pre!r}",
            hint=f"choose one of {', '.join(sorted(BYTE_LEVEL_NAMES))}",
        )
    steps = _split_steps(tokenizer.get("pre_tokenizer"))
    candidates = PRE_TOKENIZERS.get(steps, ())
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    is_supported = _normalizer_types(tokenizer.get("normalizer")) in ((), ("NFC",))
    if pre is None and not (candidates and is_supported):
        names = sorted(
            {item.name for pre_tokenizers in PRE_TOKENIZERS.values() for item in pre_tokenizers}
        )
        raise UserError(
            f"{location} splits text in an unknown way (known: {', '.join(names)})",
            hint="choose one with --pre NAME; it is verified before anything is written",
        )
    matching = [item for item in candidates if item.whole_words_first == whole_words]
    name = pre or (matching or candidates)[0].name
    names_with_dialect, dialect, difference = DIALECTS.get(steps, (frozenset(), (), ""))
    is_certain = any(item.name == name for item in matching) if pre is None else False
    return (
        PreTokenizerMatch(name, dialect, difference, is_certain)
        if name in names_with_dialect
        else PreTokenizerMatch(name, is_certain=is_certain)
    )


def build_node(steps: SplitSteps) -> dict[str, Any]:
    """Return the pre_tokenizer node of a tokenizer.json that takes these steps."""
    nodes = [_step_node(step) for step in steps]
    if "gpt2" not in steps:
        nodes.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            }
        )
    return {"type": "Sequence", "pretokenizers": nodes}


def _step_node(step: str) -> dict[str, Any]:
    """Return the node of one step."""
    match step:
        case "gpt2":
            return {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            }
        case "digits" | "numbers":
            return {"type": "Digits", "individual_digits": step == "digits"}
        case "punctuation":
            return {"type": "Punctuation", "behavior": "Contiguous"}
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}


def uses_nfc(tokenizer: dict[str, Any]) -> bool:
    """Return whether the tokenizer normalizes text to NFC. llama.cpp never does."""
    return _normalizer_types(tokenizer.get("normalizer")) == ("NFC",)


def _normalizer_types(node: Any) -> tuple[str, ...]:
    """Return the types of the normalizers in a normalizer node, "?" for an unknown one."""
    steps = [step for step in flatten_sequence(node, "normalizers") if step is not None]
    return tuple(str(step.get("type")) if isinstance(step, dict) else "?" for step in steps)


def _split_steps(node: Any) -> SplitSteps:
    """Return the steps before the byte-level step of a pre_tokenizer node. If there is no
    byte-level step, "?" is appended, which no known structure contains.
    """
    steps = tuple(_parse_step(step) for step in flatten_sequence(node, "pretokenizers"))
    if steps[-1:] == ("bytes",):
        return steps[:-1]
    return steps if "gpt2" in steps else (*steps, "?")


def _parse_step(node: Any) -> str:
    """Return one step of a pre_tokenizer node as a name ("digits") or a regular expression. Return
    "?" if llama.cpp does not have such a step.
    """
    match node:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "gpt2" if node.get("use_regex", True) else "bytes"
        case {"type": "Digits", "individual_digits": bool(is_single)}:
            return "digits" if is_single else "numbers"
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return "punctuation"
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"} if (
            not node.get("invert")
        ):
            return regex
        case {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Removed",
            "invert": True,
        }:
            # This step drops the text between matches. There is no such text, because the known
            # expressions match all text.
            return regex
    return "?"
