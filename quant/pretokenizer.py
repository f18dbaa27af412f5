"""Which of llama.cpp's pre-tokenizers a byte-level BPE tokenizer.json asks for, by its structure.

Upstream hashes the ids of a probe text, which changes with every added token and every release of
transformers; the structure does not. An unknown structure is a Refusal, never a default; a known
one is proven afterwards (proof). It knows tokenizer.json and names, no vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from quant.errors import Refusal
from quant.structure import flat

Steps = tuple[str, ...]

# Regular expressions as tokenizer.json spells them.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{WORDS}|\p{{N}}{{1,3}}{REST}"
QWEN2 = rf"{WORDS}|\p{{N}}{REST}"
NUMBERS = rf"{WORDS}|\p{{N}}+{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NEWER = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = CASED % ("", "", "")
GPT4O = CASED % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", "{1,3}")
HAN = r"[^\p{Han}]"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER[:-1]}&&{HAN}]*{LOWER[:-1]}&&{HAN}]+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER[:-1]}&&{HAN}]+{LOWER[:-1]}&&{HAN}]*{CONTRACTIONS}?|\p{{N}}{{1,3}}{REST}"
)
KANA, CJK = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+"
ASCII_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3 = (
    ASCII_MARK
    + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
SPARK = (
    ASCII_MARK
    + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+|[\r\n]|\\s+(?!\\S)|\\s+"
)
LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK = ("[\r\n]", rf"\s?[{LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
SEED = WORDS + "|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
EXAONE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
RUNS = "|".join(
    [rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)]
    + [r"\s{1,2}(?!\S)", r"\s{1}"]
)
JAIS2 = rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{RUNS}"
THREES = r"\d{1,3}(?=(?:\d{3})*\b)"


@dataclass(frozen=True, slots=True)
class Pre:
    """A pre-tokenizer of llama.cpp: its name, and whether whole words of the vocabulary go before
    merges.
    """

    name: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The name for `tokenizer.ggml.pre`.

    `dialect`: the steps that llama.cpp takes where it rewrote the expression and computes another
    one, `habit` what then is different, for people. `sure`: whether it treats whole words as
    tokenizer.json asks; where not, every word has to be compared.
    """

    name: str
    dialect: Steps = ()
    habit: str = ""
    sure: bool = True


LLAMA3_NAMES = (Pre("llama-bpe", True), Pre("smaug-bpe"))
# The steps of tokenizer.json before its bytes -> what llama.cpp calls them.
KNOWN: dict[Steps, tuple[Pre, ...]] = {
    ("gpt2",): (Pre("gpt-2"),),
    ("digits", "gpt2"): (Pre("smollm"),),
    (LLAMA3,): LLAMA3_NAMES,
    (NEWER % "{1,3}",): LLAMA3_NAMES,
    (QWEN2,): (Pre("qwen2"),),
    (QWEN35,): (Pre("qwen35"),),
    (NEWER % "",): (Pre("bailingmoe"),),
    (TEKKEN,): (Pre("tekken", True),),
    (GPT4O,): (Pre("gpt-4o"),),
    (KIMI,): (Pre("kimi-k2"),),
    (r"\p{N}{1,3}", KANA, DEEPSEEK3): (Pre("deepseek-v3"),),
    (r"\p{N}{1,3}", KANA, SPARK, "digits"): (Pre("spark2_5"),),
    (*DEEPSEEK, "digits"): (Pre("deepseek-llm"),),
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, "digits"): (Pre("deepseek-coder"),),
    (BLOOM,): (Pre("bloom"),),
    (BLOOM, "digits"): (Pre("viking"),),
    ("punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]"): (Pre("falcon"),),
    (r"\p{N}{1,3}", NUMBERS): (Pre("minicpm5", True),),
    (SEED,): (Pre("seed-coder"),),
    (EXAONE,): (Pre("exaone-moe"),),
    (JAIS2,): (Pre("jais-2"),),
    (THREES, GPT4O): (Pre("tiny_aya"),),
}
# llama.cpp's regular expressions know letters, not their case: it asks for "no a to z" where
# capitals are meant, and leaves combining marks out; or it makes no difference between letters.
CAPITALS, SMALL = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
PLAIN = CASED.replace(UPPER, CAPITALS).replace(LOWER, SMALL)
SLASHED = REST.replace(r"[\r\n]*", r"[\r\n/]*")
LETTERED = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{CONTRACTIONS}?|\p{{N}}{{1,3}}{SLASHED}"
UNHAN = rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&{HAN}]+{CONTRACTIONS}?|\p{{N}}{{1,3}}{REST}"
GROUPS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
BY_ASCII, NO_CASE = (
    "tells case and combining marks by ASCII letters alone",
    "tells no case, and marks in its own way",
)
DIALECTS: dict[Steps, tuple[frozenset[str], Steps, str]] = {
    (TEKKEN,): (frozenset({"tekken"}), (PLAIN % ("", "", ""),), BY_ASCII),
    (GPT4O,): (
        frozenset({"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}),
        (PLAIN % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", "{1,3}"),),
        BY_ASCII,
    ),
    (KIMI,): (frozenset({"kimi-k2"}), (UNHAN,), NO_CASE),
    (THREES, GPT4O): (frozenset({"tiny_aya", "cohere2moe"}), (GROUPS, LETTERED), NO_CASE),
}
# The same expression under names with which llama.cpp makes up no BOS where the file has none.
WITHOUT_BOS = {"llama-bpe": "glm4", "smaug-bpe": "chatglm-bpe"}
# The names in src/llama-vocab.cpp that take bytes.
NAMES = frozenset(
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


def find(tokenizer: dict[str, Any], where: str, pre: str | None = None) -> Found:
    """The name for `tokenizer.ggml.pre`: `pre` if the user gave one, else by the structure."""
    if pre is not None and pre not in NAMES:
        raise Refusal(
            f"llama.cpp has no pre-tokenizer {pre!r}",
            hint=f"--pre takes one of {', '.join(sorted(NAMES))}",
        )
    steps = _taken(tokenizer.get("pre_tokenizer"))
    known = KNOWN.get(steps, ())
    whole = bool(tokenizer["model"].get("ignore_merges"))
    plain = _normalizer(tokenizer.get("normalizer")) in ((), ("NFC",))
    if pre is None and not (known and plain):
        names = sorted({item.name for several in KNOWN.values() for item in several})
        raise Refusal(
            f"{where} splits text in a way that is not known here (known: {', '.join(names)})",
            hint="--pre NAME takes one of llama.cpp's, and is proven before anything is written",
        )
    fit = [item for item in known if item.whole == whole]
    name = pre or (fit or known)[0].name
    names_of, dialect, habit = DIALECTS.get(steps, (frozenset(), (), ""))
    sure = any(item.name == name for item in fit) if pre is None else False
    return Found(name, dialect, habit, sure) if name in names_of else Found(name, sure=sure)


def node(steps: Steps) -> dict[str, Any]:
    """The pre-tokenizer of a tokenizer.json that takes these steps."""
    made = [_node(step) for step in steps]
    if "gpt2" not in steps:
        made.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            }
        )
    return {"type": "Sequence", "pretokenizers": made}


def _node(step: str) -> dict[str, Any]:
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


def normalizes(tokenizer: dict[str, Any]) -> bool:
    """Whether text is brought to NFC first; llama.cpp takes text as it comes."""
    return _normalizer(tokenizer.get("normalizer")) == ("NFC",)


def _normalizer(node: Any) -> tuple[str, ...]:
    parts = [part for part in flat(node, "normalizers") if part is not None]
    return tuple(str(part.get("type")) if isinstance(part, dict) else "?" for part in parts)


def _taken(node: Any) -> Steps:
    """The steps before the bytes; a step that is in no table where text never becomes bytes."""
    steps = tuple(_step(part) for part in flat(node, "pretokenizers"))
    if steps[-1:] == ("bytes",):
        return steps[:-1]
    return steps if "gpt2" in steps else (*steps, "?")


def _step(part: Any) -> str:
    """One step as a name or a regular expression; "?" for what has no counterpart."""
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "gpt2" if part.get("use_regex", True) else "bytes"
        case {"type": "Digits", "individual_digits": bool(single)}:
            return "digits" if single else "numbers"
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return "punctuation"
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"} if (
            not part.get("invert")
        ):
            return regex
        case {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Removed",
            "invert": True,
        }:
            # what the expression leaves out would be lost: those that are known leave nothing
            return regex
    return "?"
