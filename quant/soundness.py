"""What llama.cpp would abort or crash on, instead of saying no, as far as a header shows it.

check() stands between a file and the library: an abort there ends the process with the conversation
in it. Found by mutating headers (scripts/fuzz_header.py) and by reading the assertions in
llama-model.cpp, llama-vocab.cpp and models/*.cpp. It judges metadata and shapes only; weights are
not read.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quant import charsmap, native
from quant.errors import Refusal
from quant.header import Array, Value

if TYPE_CHECKING:
    from quant.container import Header

MAX_LAYERS, MAX_EXPERTS, MAX_GATING = 512, 1024, 4  # llama-hparams.h
MAX_WINDOW, MAX_TOKENS = 1 << 24, 1 << 22
STRANGE = native.INTEGERS | {"F64", "Q8_1", "Q8_K"}  # no graph multiplies by these
TABLES = ("tid2eid", "d2t", "t2d")  # integers by nature
MAX_PIECE = 4096  # bytes of a Unigram's piece
ALIGNMENT = 32  # the CPU backend asserts that mapped weights begin at a multiple of it
SCALINGS = ("none", "linear", "yarn", "longrope")
EPSILONS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
)
# Architectures whose graph asserts one size for keys, values and the rotary part of a head
# (models/*.cpp: n_embd_head == n_rot), and those that do so for keys and values.
ONE_HEAD_SIZE = frozenset(
    {
        "apertus",
        "arcee",
        "arctic",
        "baichuan",
        "chameleon",
        "codeshell",
        "cogvlm",
        "cohere2moe",
        "dbrx",
        "deci",
        "deepseek",
        "dots1",
        "dream",
        "ernie4_5",
        "ernie4_5-moe",
        "exaone",
        "exaone-moe",
        "exaone4",
        "falcon",
        "granite",
        "granite_swa",
        "granitemoe",
        "graniteswitch",
        "grok",
        "grovemoe",
        "hunyuan-dense",
        "hunyuan-moe",
        "hunyuan_vl",
        "hy_v3",
        "internlm2",
        "jais2",
        "llada",
        "llada-moe",
        "llama",
        "llama-embed",
        "llama4",
        "maincoder",
        "mellum",
        "minicpm",
        "mistral3",
        "olmo",
        "olmo2",
        "olmoe",
        "orion",
        "paddleocr",
        "pangu-embedded",
        "plamo",
        "pockettts",
        "qwen2",
        "qwen2moe",
        "qwen2vl",
        "qwen3",
        "qwen3moe",
        "qwen3tts",
        "qwen3vl",
        "qwen3vlmoe",
        "rnd1",
        "seed_oss",
        "smallthinker",
        "smollm3",
        "starcoder2",
        "talkie",
        "xverse",
    }
)
ONE_KEY_SIZE = frozenset(
    {
        "afmoe",
        "bailingmoe2",
        "bert",
        "bitnet",
        "bloom",
        "chatglm",
        "cohere2",
        "command-r",
        "dflash",
        "eagle3",
        "eurobert",
        "glm4",
        "glm4moe",
        "gpt2",
        "gptneox",
        "granitehybrid",
        "jais",
        "jina-bert-v2",
        "jina-bert-v3",
        "laguna",
        "minimax-01",
        "minimax-m2",
        "minimax-m3",
        "modern-bert",
        "mpt",
        "muse-glimmer",
        "nanbeige",
        "nemotron",
        "nemotron_h",
        "nemotron_h_moe",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "openelm",
        "phi2",
        "phi3",
        "phimoe",
        "qwen",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "refact",
        "spark2_5",
        "stablelm",
        "starcoder",
        "t5",
        "t5encoder",
    }
)
# Of the former those whose layers may look back through a window; the others read none.
WINDOWED = {
    "cohere2moe",
    "exaone-moe",
    "exaone4",
    "granite_swa",
    "llama4",
    "mellum",
    "olmo2",
    "smallthinker",
}
IN_WINDOWS = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
# Others whose graph turns every head: nothing to turn is a loop without an end.
ROTARY = ONE_HEAD_SIZE | {
    "gemma",
    "gemma2",
    "gemma3",
    "phi2",
    "phi3",
    "stablelm",
    "command-r",
    "cohere2",
    "glm4",
    "chatglm",
    "deepseek2",
    "exaone",
    "exaone4",
    "gptneox",
    "gpt-oss",
    "seed_oss",
    "gemma3n",
    "qwen2vl",
    "ernie4_5",
    "hunyuan-dense",
}
# Tokenizer kinds that have no bos (eos) unless the file names one: adding it would be an assertion.
NO_BOS, NO_EOS = frozenset({"t5", "rwkv", "gemma4"}), frozenset({"bert", "rwkv", "gemma4"})
IMATRIX, MOMENTS = (
    "imatrix",
    "llmcli.moments",
)  # the general.type of llama-imatrix's files, and of second moments
STATISTICS = {IMATRIX: "--imatrix", MOMENTS: "--moments"}  # and the flag that takes them
NO_BOS_PRE = frozenset({"chatglm-bpe", "glm4", "glm5"})


def check_model(header: "Header") -> None:
    """Refuse a GGUF file that is none of a model's: statistics of one have tensors, too."""
    kind, flag = (
        header.metadata.get("general.type"),
        STATISTICS.get(str(header.metadata.get("general.type"))),
    )
    if flag:
        raise Refusal(
            f"{header.path} is no model but statistics of one ({kind})",
            hint=f"llmcli quantize takes it as {flag} '{header.path}'",
        )
    if header.architecture == "unknown":
        raise Refusal(
            f"{header.path} is no model that llama.cpp could load: it names no architecture",
            hint=f"llmcli show '{header.path}' tells what is in it",
        )


def check(header: "Header") -> None:
    """Refuse what is no model, and one that would take the process down when it is loaded; lists
    every reason.
    """
    check_model(header)
    problems = [
        *_layout(header),
        *_layers(header),
        *_heads(header),
        *_latent(header),
        *_window(header),
    ]
    problems += [*_experts(header), *_numbers(header), *_types(header), *_vocabulary(header)]
    if problems:
        told = "; ".join(problems[:3]) + f"; and {len(problems) - 3} more" * (len(problems) > 3)
        raise Refusal(
            f"{header.path} would crash llama.cpp: {told}", hint="fetch or convert the file again"
        )


def _layout(header: "Header") -> Iterator[str]:
    if header.tensors and header.alignment % ALIGNMENT:
        yield f"its weights are aligned to {header.alignment} bytes, not to {ALIGNMENT}"


def _layers(header: "Header") -> Iterator[str]:
    layers = header.number("block_count")
    if layers is None:
        return  # said by llama.cpp itself
    if not 0 < layers <= MAX_LAYERS:
        yield f"block_count is {layers}, allowed are 1 to {MAX_LAYERS}"
    for key in ("nextn_predict_layers", "posnet.block_count", "convnext.block_count"):
        if (header.number(key) or 0) > layers:
            yield f"{key} is larger than block_count"


def _heads(header: "Header") -> Iterator[str]:
    heads, width = header.number("attention.head_count"), header.number("embedding_length")
    counts = _numbers_of(header.metadata.get(f"{header.architecture}.attention.head_count"))
    if header.tensors and header.architecture in ROTARY and not any(counts):
        yield "its attention has no heads"
    if not heads or not width:
        return
    size = width // heads
    found = {
        "attention.key_length": header.number("attention.key_length"),
        "attention.value_length": header.number("attention.value_length"),
        "rope.dimension_count": header.number("rope.dimension_count"),
    }
    sizes = {
        size if value is None else value
        for key, value in found.items()
        if key != "rope.dimension_count"
    }
    key_size = found["attention.key_length"] or size
    alike = header.architecture in ONE_KEY_SIZE
    if header.architecture in {*ONE_HEAD_SIZE, "gpt-oss"}:
        alike = True
        sizes.add(found["rope.dimension_count"] or key_size)
        narrow = {key: value for key in IN_WINDOWS if (value := header.number(key)) is not None}
        sizes.update(narrow.values())
        found |= narrow
    if alike and len(sizes) > 1:
        told = ", ".join(f"{key} {value}" for key, value in found.items() if value is not None)
        yield f"its heads have several sizes ({told or size})"
    rotary = found["rope.dimension_count"] or 0
    if rotary % 2 or rotary > key_size:
        yield f"{rotary} values of each head are rotary, a head has {key_size}"
    if header.architecture in ROTARY and 0 in found.values():
        yield "its heads have a size of 0"


def _latent(header: "Header") -> Iterator[str]:
    """Sizes that DeepSeek's graph takes for granted: one head of keys, as long as what is
    compressed and turned.
    """
    whole = header.number("attention.key_length_mla")
    if header.architecture != "deepseek2" or not whole:
        return
    heads, key = (
        header.number("attention.head_count_kv"),
        header.number("attention.key_length") or 0,
    )
    turned = header.number("rope.dimension_count") or key
    if heads != 1:
        yield f"its compressed keys have {heads} heads"
    if key != (header.number("attention.kv_lora_rank") or 0) + turned or whole <= turned:
        yield f"its compressed keys have {key} values, its whole ones {whole}, of which {turned} are rotary"


def _window(header: "Header") -> Iterator[str]:
    window = header.number("attention.sliding_window") or 0
    if window > MAX_WINDOW and header.architecture not in ONE_HEAD_SIZE - WINDOWED:
        yield f"its sliding window is {window} positions"


def _types(header: "Header") -> Iterator[str]:
    for tensor in header.tensors:
        vector = tensor.elements == tensor.columns
        strange = tensor.type in STRANGE or (vector and tensor.type not in native.FLOATS)
        if strange and not any(part in tensor.name for part in TABLES):
            yield f"tensor {tensor.name} is stored as {tensor.type}"


def _experts(header: "Header") -> Iterator[str]:
    count, groups = header.number("expert_count") or 0, header.number("expert_group_count") or 0
    used = max(
        _numbers_of(header.metadata.get(f"{header.architecture}.expert_used_count")), default=0
    )
    gating = header.number("expert_gating_func") or 0
    if not 0 <= gating <= MAX_GATING:
        yield f"its experts are chosen by function {gating}; there are {MAX_GATING}"
    if count > MAX_EXPERTS or used > count or (count and not used):
        yield f"it uses {used} of {count} experts (at most {MAX_EXPERTS})"
    if groups and groups >= count:
        yield f"it has {groups} groups of {count} experts"
    elif groups > 1:
        picked = header.number("expert_group_used_count") or 0
        if count % groups or not 0 < picked < groups:
            yield f"it picks {picked} of {groups} groups of {count} experts"


def _numbers(header: "Header") -> Iterator[str]:
    for key in EPSILONS:
        value = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(value, float) and not 0 <= value < math.inf:
            yield f"{key} is {value}"
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in SCALINGS:
        yield f"its rope scaling {scaling!r} is unknown"


def _numbers_of(value: Value | None) -> list[int]:
    """A number, or one for each layer."""
    if isinstance(value, Array) and value.kind != "string":
        return [item for item in value.head(MAX_LAYERS).values() if isinstance(item, int)]
    return [value] if isinstance(value, int) else []


def _vocabulary(header: "Header") -> Iterator[str]:
    kind, tokens = header.tokenizer, header.metadata.get("tokenizer.ggml.tokens")
    if kind in ("none", "no_vocab") or not isinstance(tokens, Array) or tokens.kind != "string":
        return
    if tokens.count > MAX_TOKENS:
        yield f"its vocabulary has {tokens.count} tokens"
        return
    # As llama.cpp reads them: up to the first zero byte, and never empty.
    cut = (word.partition(b"\0")[0] if b"\0" in word else word for word in tokens.blobs())
    words = [word or b"[EMPTY_%d]" % index for index, word in enumerate(cut)]
    known = set(words)
    if len(known) != len(words):
        yield f"its vocabulary has {len(words) - len(known)} tokens twice"
    if kind == "t5":
        yield from _unigram(header, words)
    if kind == "llama":
        missing = [
            byte
            for byte in range(256)
            if b"<0x%02X>" % byte not in known and bytes([byte]) not in known
        ]
        if missing:
            yield f"its vocabulary lacks {len(missing)} of the 256 bytes"
    pre = header.metadata.get("tokenizer.ggml.pre")
    for slot, lacking in (("bos", kind in NO_BOS or pre in NO_BOS_PRE), ("eos", kind in NO_EOS)):
        named = header.metadata.get(f"tokenizer.ggml.{slot}_token_id")
        absent = not isinstance(named, int) or named >= len(words)
        if header.metadata.get(f"tokenizer.ggml.add_{slot}_token") is True and lacking and absent:
            yield f"it adds a {slot} token and has none"


def _unigram(header: "Header", words: list[bytes]) -> Iterator[str]:
    """llama.cpp follows rules wherever they lead, and keeps pieces in a tree as deep as they are
    long.
    """
    if max(map(len, words), default=0) > MAX_PIECE:
        yield f"its vocabulary has a piece of {max(map(len, words))} bytes, allowed are {MAX_PIECE}"
    rules = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if rules is None or (isinstance(rules, Array) and not rules.count):
        return
    try:
        if (
            not isinstance(rules, Array)
            or rules.kind not in ("int8", "uint8")
            or rules.nbytes > charsmap.LARGEST
        ):
            raise ValueError("it is no array of bytes, or too long")
        charsmap.parse(rules.raw())
    except ValueError as error:
        yield f"its precompiled_charsmap is damaged: {error}"
