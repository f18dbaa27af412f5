"""Fixed strings for verifying a tokenizer. There are more than 500, each of a kind that some
pre-tokenizers split differently.

`model_strings` adds strings that are specific to a model: its added tokens and its words.
"""

import functools
import itertools
import random
from collections.abc import Sequence

PROSE = (
    "",
    "a",
    "Hello world",
    " Hello world",
    "Hello  world ",
    "Hello, world! How are you?",
    "The quick brown fox.",
    (
        "McDonald's iPhone eBay XMLHttpRequest getHTTPResponseCode snake_case_name "
        "SCREAMING_SNAKE kebab-case camelCase"
    ),
    "ALL CAPS AND Title Case aNd MiXeD",
    "state-of-the-art re-enter co-op e-mail",
    "U.S.A. e.g. i.e. Ph.D. a.m. 3rd",
    "He said: \"It's 'fine', isn't it?\" (No.) [Yes!] {Maybe…} — or – not",
    "“curly” ‘quotes’ «guillemets» „low“",
    (
        "3.14159 -42 +7 1e-9 0x1F 0b1010 1,234,567.89 50% $9.99 €10 £5 ¥100 ½ ² ³ ⅷ ① ٣٤ १२३ "
        "๔๕ 一二三 ⅓cup"
    ),
    (
        "2024-01-31T23:59:59Z 12:30 192.168.0.1 v1.2.3-rc.4+build.5 +1 (555) 010-9999 #hashtag "
        "@user a@b.example"
    ),
    (
        "https://example.org/a/b?c=d&e=%20f#g C:\\Users\\me\\file.txt ~/.config /usr/lib *.py "
        "../x ./y //z"
    ),
    "E = mc², ∑_{i=0}^{n} i² ≤ ∞, α→β, x∈ℝ, ¬p ∨ q, ∂f/∂x ≈ 0, √2, 5×3÷2±1, 90°",
    "© ® ™ § ¶ † ‡ • ° № ℃ ℉ Å Ω ﬁ ﬂ",
    "# Title\n\n* item one\n* item two\n    1. nested\n\n> quote\n\n```py\nx = 1\n```\n\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    '<html><body class="x">&amp;&nbsp;<br/></body></html>\n',
    '{"key": [1, 2.5, null, true], "s": "a\\nb\\u00e9"}',
)
CODE = (
    (
        "def f(x: int) -> str:\n    '''doc'''\n    if x > 0 and not x % 2:\n        return "
        'f"{x:>10.2f}"\n\n'
    ),
    (
        "class A(B):\n\t@property\n\tdef c(self):\n\t\treturn self._c[1:-1] or {**d}\n\n# "
        "note\nlambda *a, **k: (yield)\n"
    ),
    (
        "#include <stdio.h>\nint main(int argc, char **argv) {\n  for (int i = 0; i < 10; ++i) "
        'printf("%d\\n", i);\n}\n'
    ),
    (
        "template<typename T> auto f(T&& t) -> decltype(t) { return std::move(t); } // "
        "C++\n#define X(a) #a##b\n"
    ),
    (
        "fn main() -> Result<(), Box<dyn Error>> {\n    let v: Vec<_> = (0..=9).map(|x| x * "
        "2).collect();\n    Ok(())\n}\n"
    ),
    (
        "const f = async ({a, b = 2, ...c}) => await `x ${a ?? b?.d} y`;\r\nif (a !== b && c "
        "|| !d) { x ||= y; }\r\n"
    ),
    (
        "SELECT a.*, COUNT(*) AS n FROM t AS a LEFT JOIN u ON a.id = u.id WHERE a.x LIKE '%y%' "
        "GROUP BY 1;\n--c\n"
    ),
    "for f in *.txt; do echo \"${f%.txt}\" | sed -e 's/a/b/g' >> out.log 2>&1; done && exit $?\n",
    (
        'package main\n\nimport "fmt"\n\nfunc main() {\n\tx := []int{1, 2}\n\tdefer '
        "fmt.Println(x...)\n}\n"
    ),
    (
        "public static void main(String[] args) throws IOException { List<Map<String, "
        "Integer>> l = new ArrayList<>(); }\n"
    ),
    "main = do\n  xs <- map (\\x -> x >>= f) <$> getLine\n  where f 0 = []; f n = n : f (n - 1)\n",
    (
        "\\begin{equation}\\label{eq:a}\n  \\frac{\\partial u}{\\partial t} = \\nabla^2 u % "
        "heat\n\\end{equation}\n"
    ),
    "all: a.o b.o\n\t$(CC) -o $@ $^ -lm\n.PHONY: clean\nclean:\n\trm -f *.o\n",
    "a:\n  - b: 1\n    c: [x, 'y']\n  # z\n",
    "  0:\t55                   \tpush   %rbp\n  1:\t48 89 e5             \tmov    %rsp,%rbp\n",
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n \n",
    "^(?:[a-z0-9]+(?:-[a-z0-9]+)*)?$\\d{3,}\\s*\\S+?(?=x)",
)
SCRIPTS = (
    "Привет, мир! Как дела? Съешь ещё этих мягких французских булок.",
    "ПРИВЕТ Мир приВет",
    "нещо на Български",
    "Γειά σου Κόσμε! ΑΒΓ αβγ ἀρχή",
    "Ünïcödé çà è Ñandú straße ŁÓDŹ żółć ěščřžýáíé İstanbul ığdır",
    "Éa éA ÀB ßẞ ǅ ǆ Ǆ",
    "camelCaseÉtéÜber ÉCOLEécole naïveTEXT ПриветМир helloМИРworld αΒγΔ",
    "Tiếng Việt: Xin chào thế giới, đường phố",
    "你好，世界！我想在apple工作1314151天～",
    "日本語のテキスト、カタカナとひらがな。漢字２０２４年",
    "한국어 텍스트 안녕하세요 세계",
    "繁體中文：測試「引號」與《書名號》、頓號；冒號……省略號——破折號",
    "ｆｕｌｌｗｉｄｔｈ　ＡＢＣ　１２３！（）",
    "ﾊﾝｶｸ ｶﾀｶﾅ",
    "ภาษาไทยไม่มีการเว้นวรรคระหว่างคำ สวัสดีครับ ๑๒๓",
    "ລາວ ສະບາຍດີ",
    "កាន់តែពិសេសអាច",
    "မြန်မာဘာသာ မင်္ဂလာပါ",
    "नमस्ते दुनिया, क्षत्रिय ज्ञान १२३",
    "বাংলা ভাষা নমস্কার",
    "தமிழ் வணக்கம்",
    "తెలుగు నమస్కారం",
    "ಕನ್ನಡ",
    "മലയാളം നമസ്കാരം",
    "ગુજરાતી",
    "ਪੰਜਾਬੀ",
    "සිංහල ආයුබෝවන්",
    "བོད་སྐད་",
    "አማርኛ ሰላም ፩፪",
    "ქართული გამარჯობა",
    "Հայերեն բարեւ",
    "ᏣᎳᎩ",
    "ᠮᠣᠩᠭᠣᠯ",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "العَرَبِيَّة مُشَكَّلَة",
    "سلام دنیا می‌خواهم",
    "اردو زبان ہے۔",
    "שלום עולם! מה שלומך?",
    "שָׁלוֹם עִבְרִית",
    "\u202bשלום\u202c abc \u200fמשולב\u200e text",
    "a\u0627b\u05d0c 1\u06612",
    "𝕳𝖊𝖑𝖑𝖔 𝒲𝑜𝓇𝓁𝒹 𝟙𝟚𝟛",
    "𐍈𐌰𐌽 𓀀𓀁 𠀀𠀁",
    "Mixed English и русский and 中文 و عربي with हिन्दी & 한국어 1a2b3c",
    "中文English混排test测试123数字4.5",
    "e=é n=ñ ü",
)
MARKS = (
    "e\u0301 n\u0303 u\u0308 a\u030a",
    "Cafe\u0301 na\u0131\u0308ve re\u0301sume\u0301",
    "Z\u0351\u036b\u0343a\u0329l\u034eg\u0321o",
    "o\u0302\u0301 \u0301a \u0301\u0301 1\u0301 !\u0301 \n\u0301",
    "\u1100\u1161\u11a8 \uac00\u0301",
    "\u0915\u094d\u0937\u093f",
    "a\u0300\u0301\u0302\u0303\u0304b",
    "E\u0301COLE\u0301A",
    "\u0958 \u2126 \u212b \ufb01 \u1e9b\u0323",
    "x\u20d7 y\u0305",
)
EMOJI = (
    "🚀",
    "🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅",
    "🦙🦙 🦙",
    "👩\u200d👩\u200d👧\u200d👦 family",
    "👍🏽👍🏿 ok",
    "🇩🇪🇯🇵🇺🇳",
    "❤️ ❤ ☺️ ☺",
    "1️⃣2️⃣ #️⃣ *️⃣",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "a🙂b🙃c",
    "text🎉!!!🎉 text",
    "¯\\_(ツ)_/¯ (╯°□°)╯︵ ┻━┻",
    "♠♥♦♣ ★☆ ✓✗ →←↑↓ ─│┌┐ ░▒▓█",
    "🤷🏻\u200d♀️",
    "♪♫ 𝄞",
)
INVISIBLE = (
    "a\u00a0b",
    "a\u200bb",
    "a\u2003b\u2009c\u3000d",
    "\ufeffbom",
    "soft\u00adhyphen",
    "zero\u200cnon\u200djoin",
    "a\u2028b\u2029c",
    "a\x0bb\x0cc",
    "bell\x07 esc\x1b[0m",
    "\u00a0\u00a0x",
    "x \u00a0 y",
    "nul-less \x01\x02",
    "\x7f",
    "\u0085x",
    "\ufffd",
    "\ue000 \U000f0000",
    "\u1680x\u180ey",
    "\u205f\u2060a",
)
LOOKALIKES = (
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>",
    "a<|endoftext|>b",
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "[INST] x [/INST]",
    "<s>[INST] <<SYS>>\nx\n<</SYS>>\n\ny [/INST] z </s>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>",
    "<start_of_turn>user\nx<end_of_turn>\n",
    "<|user|>\nx<|end|>\n<|assistant|>",
    "<think>\nx\n</think>\n\ny",
    "<tool_call>{}</tool_call>",
    "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>",
    "[gMASK]<sop><|user|>",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "<0x0A> <0xZZ>",
    "<|start|>system<|message|>x<|end|><|return|>",
    "<| im_start |> <|im_start |",
    "<|>",
    "<||>",
    "|>",
    "<|unknown|>",
    "[PAD] [MASK] [CLS]",
    "<unused0>",
    "▁ ▁▁a b▁c",
    "ĠHello Ċ",
    "<mask> x <mask>",
    " <s> x </s> ",
    "<extra_id_0>",
    "<bos><eos>",
)
SUFFIXES = ("s", "t", "re", "ve", "m", "ll", "d")


@functools.cache
def probe_strings() -> tuple[str, ...]:
    """Return the fixed probe strings without duplicates."""
    generated = (
        *_digits(),
        *_spaces(),
        *_marks(),
        *_contractions(),
        *_cases(),
        *_long(),
        *_mixed(),
    )
    return tuple(
        dict.fromkeys(
            (*PROSE, *CODE, *SCRIPTS, *MARKS, *EMOJI, *INVISIBLE, *LOOKALIKES, *generated)
        )
    )


def model_strings(added: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return probe strings for one model: its added tokens in running text, and its words in groups
    of twelve. Random choices have a fixed seed.
    """
    rng = random.Random(1)
    tokens = (
        list(added) if len(added) <= 200 else [*added[:100], *rng.sample(list(added[100:]), 100)]
    )
    strings = list(tokens)
    for token in tokens[:100]:
        strings += [f"before {token} after", f"x{token}y", f"\n{token}{token} \n"]
    picked = rng.sample(list(words), min(len(words), 2400))
    return strings + [
        separator.join(picked[start : start + 12])
        for start in range(0, len(picked), 12)
        for separator in ("", " ")
    ]


def _digits() -> list[str]:
    """Return numbers of many lengths and in several scripts."""
    numbers = ["1234567890123456789012345"[:length] for length in range(1, 26)]
    strings = [
        *numbers,
        *(f"a{number}b" for number in numbers[:9]),
        *(f" {number}." for number in numbers[:9]),
    ]
    return [
        *strings,
        " ".join(numbers),
        "3.3 3..3 3...3",
        "１２３４５",
        "٠١٢٣٤٥٦",
        "०१२३४",
        "12३४５",
        "²³¹ ⅣⅤ ¼½",
        "1 234 567",
        "00001 0.0001",
    ]


def _spaces() -> list[str]:
    """Return runs and pairs of spaces, tabs and line ends."""
    runs = [
        kind * count
        for kind in (" ", "\n", "\t", "\r\n")
        for count in (1, 2, 3, 4, 7, 8, 9, 16, 31)
    ]
    strings = [text for run in runs for text in (run, f"a{run}b", f"{run}b", f"a{run}", f"!{run}?")]
    pairs = [
        "".join(pair)
        for pair in itertools.product((" ", "  ", "\n", "\n\n", "\t", "\r\n"), repeat=2)
    ]
    return [
        *strings,
        *(f"x{pair}y" for pair in pairs),
        *(f"x.{pair}" for pair in pairs),
        "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n",
    ]


def _marks() -> list[str]:
    """Return punctuation marks, alone, repeated and between words."""
    strings = [
        mark * count for mark in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~" for count in (1, 3, 17)
    ]
    strings += [
        "------======= !!!???... '''''```````\"\"\"\"......!!!!!!??????",
        "a!b@c#d$e%f^g&h*i(j)k",
        "!?\n\n.,\r\n;:/\n//\n",
    ]
    return [
        *strings,
        *(f"{mark}a {mark}1 b{mark} {mark}\n" for mark in "!$'(-./<@[_`|~、。！「·…—"),
    ]


def _contractions() -> list[str]:
    """Return English contractions such as "we'll" in upper and lower case."""
    strings = []
    for suffix in SUFFIXES:
        for form in {suffix, suffix.upper(), suffix.capitalize(), suffix[0] + suffix[1:].upper()}:
            strings += [
                f"we'{form} go",
                f"WE'{form}",
                f"'{form}",
                f"x '{form}y",
                f"é'{form} 1'{form}",
            ]
    return [
        *sorted(strings),
        (
            "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like tea? "
            "We'Ve a'lL"
        ),
        "it’s don’t",
        "''s",
    ]


def _cases() -> list[str]:
    """Return three-letter combinations of upper and lower case letters of several scripts."""
    parts = ("a", "B", "é", "É", "ж", "Ж", "中", "1", "ʰ", "ǅ", "ا", "\u0301")
    return [
        first + second + third
        for first, second, third in itertools.product(parts[:8], parts, ("x", "Y"))
    ][::2]


def _long() -> list[str]:
    """Return long words and long runs of one character."""
    rng = random.Random(0)
    letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(1000))
    return [
        "a" * 300,
        letters,
        letters.upper(),
        "Donaudampfschifffahrtsgesellschaftskapitän" * 5,
        "ab" * 400,
        "漢" * 200,
        "=" * 500,
        "0" * 300,
    ]


def _mixed() -> list[str]:
    """Return random strings over a mixed alphabet, with a fixed seed."""
    rng, alphabet = random.Random(2), "aZ9 \n\t.,'!-_/éЖ中ก\u0301ا🙂\u200d<|>"
    return ["".join(rng.choice(alphabet) for _ in range(rng.randrange(4, 40))) for _ in range(120)]
