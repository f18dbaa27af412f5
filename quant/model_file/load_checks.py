"""Checks a GGUF header for content on which llama.cpp would abort or crash instead of returning an
error.

An abort in the library would end the whole process, and with it the user's conversation. The checks
were found with mutated headers (scripts/fuzz/header.py) and in the assertions of llama-model.cpp,
llama-vocab.cpp and models/*.cpp. Only metadata and shapes are checked; weights are not read.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.errors import UserError, list_first
from quant.gguf.header import GgufArray, MetadataValue
from quant.native import ggml
from quant.tokenizer import charsmap
from quant.tokenizer.unigram import MAX_PIECE_BYTES

if TYPE_CHECKING:
    from quant.model_file.model_header import ModelHeader

MAX_LAYERS, MAX_EXPERTS, MAX_GATING = 512, 1024, 4  # llama-hparams.h
# of files with draft heads, which `llmcli convert --heads` writes
HEADS_ARCHITECTURE = "llmcli-heads"
MAX_WINDOW_TOKENS, MAX_TOKENS = 1 << 24, 1 << 22
# llama.cpp cannot multiply by tensors of these types.
UNSUPPORTED_TYPES = ggml.INTEGER_TYPES | {"F64", "Q8_1", "Q8_K"}
INTEGER_TENSORS = ("tid2eid", "d2t", "t2d")  # tensors that contain integers
# The CPU backend asserts that the addresses of mapped weights are multiples of this.
WEIGHT_ALIGNMENT_BYTES = 32
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
EPSILON_KEYS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
)
# Architectures whose graph asserts that the keys, the values and the rotary part of a head have one
# size (models/*.cpp: n_embd_head == n_rot). In ARCHS_WITH_ONE_KEY_SIZE below, the graph asserts it
# for keys and values only.
ARCHS_WITH_ONE_HEAD_SIZE = frozenset(
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
ARCHS_WITH_ONE_KEY_SIZE = frozenset(
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
# The architectures of ARCHS_WITH_ONE_HEAD_SIZE whose layers may have a sliding window. The other
# architectures of that set ignore the key.
ARCHS_WITH_WINDOWS = {
    "cohere2moe",
    "exaone-moe",
    "exaone4",
    "granite_swa",
    "llama4",
    "mellum",
    "olmo2",
    "smallthinker",
}
HEAD_KEYS: tuple[str, ...] = (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
)
KEY_LENGTH, VALUE_LENGTH, ROTARY_LENGTH = HEAD_KEYS
WINDOW_HEAD_KEYS: tuple[str, ...] = (
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
# Architectures whose graph rotates every head: llama.cpp loops forever if a head has size 0.
ROTARY_ARCHS = ARCHS_WITH_ONE_HEAD_SIZE | {
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
# Architectures with Mamba-2 layers whose loaders accept a convolution without a bias. The graph adds
# the bias of every convolution (models/mamba-base.cpp).
ARCHS_WITH_CONVOLUTION_BIAS = frozenset(
    {"falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
)
# Tokenizers without a default BOS (or EOS). llama.cpp fails an assertion if the file says that a
# BOS is added to texts but has no id for it.
TOKENIZERS_WITHOUT_BOS = frozenset({"t5", "rwkv", "gemma4"})
TOKENIZERS_WITHOUT_EOS = frozenset({"bert", "rwkv", "gemma4"})
# Architectures of files that cannot write text without the model for which they draft tokens.
DRAFT_ARCHITECTURES = frozenset({"eagle3"})
# general.type of the files of llama-imatrix, and of our files of second moments.
IMATRIX_TYPE, MOMENTS_TYPE = "imatrix", "llmcli.moments"
# general.type -> the flag of `quantize` that takes a file of this type.
STATISTICS_FLAGS = {IMATRIX_TYPE: "--imatrix", MOMENTS_TYPE: "--moments"}
PRE_TOKENIZERS_WITHOUT_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})


def require_model(header: "ModelHeader") -> None:
    """Raise UserError unless a GGUF file contains a model. Files of calibration statistics are GGUF
    files with tensors, too, and get their own message.
    """
    kind, flag = (
        header.metadata.get("general.type"),
        STATISTICS_FLAGS.get(str(header.metadata.get("general.type"))),
    )
    if flag:
        raise UserError(
            f"{header.path} is not a model but statistics of one ({kind})",
            hint=f"llmcli quantize takes it as {flag} '{header.path}'",
        )
    if header.architecture == HEADS_ARCHITECTURE:
        raise UserError(
            f"{header.path} is not a model but draft heads of one",
            hint=f"run the model with them: llmcli run MODEL -md '{header.path}'",
        )
    if header.architecture == "unknown":
        raise UserError(
            f"{header.path} is not a model that llama.cpp can load: it names no architecture",
            hint=f"llmcli show '{header.path}' lists what is in it",
        )


def check_loadable(
    header: "ModelHeader", *, is_draft: bool = False, was_rehearsed: bool = False
) -> None:
    """Raise UserError if a file is not a model, or if loading it would crash llama.cpp. The message
    lists the first three reasons. `is_draft`: whether the file is loaded to draft tokens for another
    model, for which it need not be a model of its own. `was_rehearsed`: whether llmcli has loaded
    this very file in a child process before; its vocabulary is not read again then, which takes a
    tenth of a second for 150,000 tokens.
    """
    require_model(header)
    if header.architecture in DRAFT_ARCHITECTURES and not is_draft:
        raise UserError(
            f"{header.path.name} only drafts tokens for the model that it was trained on "
            f"(architecture {header.architecture})",
            hint=f"name that model: llmcli chat REF -md '{header.path}'",
        )
    problems = [
        *_layout_problems(header),
        *_layer_problems(header),
        *_attention_problems(header),
        *_expert_problems(header),
        *_setting_problems(header),
        *_type_problems(header),
        *_convolution_problems(header),
        *(() if was_rehearsed else _vocabulary_problems(header)),
    ]
    if problems:
        raise UserError(
            f"{header.path} would crash llama.cpp: {list_first(problems, 3)}",
            hint="fetch or convert the file again",
        )


def _layout_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the problems with the positions of the weights in the file."""
    if header.tensors and header.alignment % WEIGHT_ALIGNMENT_BYTES:
        yield (
            f"its weights are aligned to {header.alignment} bytes, not to {WEIGHT_ALIGNMENT_BYTES}"
        )


def _layer_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the problems with the number of layers."""
    layers = header.get_int("block_count")
    if layers is None:
        return  # a missing count is an error that llama.cpp reports itself
    if not 0 < layers <= MAX_LAYERS:
        yield f"block_count is {layers}; 1 to {MAX_LAYERS} are allowed"
    for key in ("nextn_predict_layers", "posnet.block_count", "convnext.block_count"):
        if (header.get_int(key) or 0) > layers:
            yield f"{key} is larger than block_count"


def _as_list(value: MetadataValue | None) -> list[int]:
    """Return the integers of a metadata value: a single number, or an array's numbers for the first
    MAX_LAYERS layers. Any other value gives an empty list.
    """
    if isinstance(value, GgufArray) and value.kind != "string":
        return [item for item in value.head(MAX_LAYERS).read_values() if isinstance(item, int)]
    return [value] if isinstance(value, int) else []


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes of the attention that a model's header records. A size is None or 0 if the header
    does not record it.

    `head_counts` has one number for all layers, or one for each layer. `lengths` has the sizes of a
    head by metadata key (HEAD_KEYS). It also has the sizes in layers with a sliding window
    (WINDOW_HEAD_KEYS) if the architecture's graph compares them. `full_key_length` is the size of
    an uncompressed key in DeepSeek's MLA.
    """

    architecture: str
    head_counts: tuple[int, ...]
    heads: int | None
    kv_heads: int | None
    embedding_length: int | None
    lengths: Mapping[str, int]
    full_key_length: int | None
    kv_rank: int
    window: int

    @classmethod
    def from_header(cls, header: "ModelHeader") -> "AttentionSizes":
        """Read the sizes from a model's header."""
        architecture = header.architecture
        keys = HEAD_KEYS
        if architecture in ARCHS_WITH_ONE_HEAD_SIZE or architecture == "gpt-oss":
            keys += WINDOW_HEAD_KEYS
        return cls(
            architecture,
            tuple(_as_list(header.metadata.get(f"{architecture}.attention.head_count"))),
            header.get_int("attention.head_count"),
            header.get_int("attention.head_count_kv"),
            header.get_int("embedding_length"),
            {key: value for key in keys if (value := header.get_int(key)) is not None},
            header.get_int("attention.key_length_mla"),
            header.get_int("attention.kv_lora_rank") or 0,
            header.get_int("attention.sliding_window") or 0,
        )

    @property
    def head_size(self) -> int | None:
        """The default size of a head, which llama.cpp uses if the header records no length; None if
        it cannot be computed.
        """
        if not self.heads or not self.embedding_length:
            return None
        return self.embedding_length // self.heads

    @property
    def key_size(self) -> int:
        """The size of a head's key, 0 if it is unknown."""
        return self.lengths.get(KEY_LENGTH) or self.head_size or 0

    @property
    def rotary_size(self) -> int:
        """The number of rotary values in a head, 0 if the header does not record it."""
        return self.lengths.get(ROTARY_LENGTH, 0)

    @property
    def has_no_heads(self) -> bool:
        """Whether the model has no heads, although the architecture's graph rotates every head."""
        return self.architecture in ROTARY_ARCHS and not any(self.head_counts)

    @property
    def has_several_sizes(self) -> bool:
        """Whether sizes of a head differ that the architecture's graph requires to be equal."""
        default = self.head_size or 0
        sizes = {self.lengths.get(key, default) for key in (KEY_LENGTH, VALUE_LENGTH)}
        if self.architecture in ARCHS_WITH_ONE_HEAD_SIZE or self.architecture == "gpt-oss":
            sizes.add(self.rotary_size or self.key_size)
            sizes.update(self.lengths[key] for key in WINDOW_HEAD_KEYS if key in self.lengths)
        elif self.architecture not in ARCHS_WITH_ONE_KEY_SIZE:
            return False
        return len(sizes) > 1

    @property
    def has_impossible_rotary_size(self) -> bool:
        """Whether the number of rotary values is odd, or larger than the size of a key."""
        return bool(self.rotary_size % 2) or self.rotary_size > self.key_size

    @property
    def has_empty_heads(self) -> bool:
        """Whether heads have size 0, although the architecture's graph rotates every head."""
        return self.architecture in ROTARY_ARCHS and 0 in self.lengths.values()

    @property
    def has_latent_attention(self) -> bool:
        """Whether DeepSeek's graph caches compressed keys for this model."""
        return self.architecture == "deepseek2" and bool(self.full_key_length)

    @property
    def has_misfit_compressed_keys(self) -> bool:
        """Whether the sizes of keys contradict DeepSeek's graph: a cached key must consist of a
        compressed and a rotary part, and a full key must be larger than its rotary part.
        """
        key = self.lengths.get(KEY_LENGTH, 0)
        rotary = self.rotary_size or key
        return key != self.kv_rank + rotary or (self.full_key_length or 0) <= rotary

    @property
    def has_huge_window(self) -> bool:
        """Whether the graph uses a sliding window that is so large that llama.cpp's computations
        with it overflow.
        """
        ignores_window = self.architecture in ARCHS_WITH_ONE_HEAD_SIZE - ARCHS_WITH_WINDOWS
        return self.window > MAX_WINDOW_TOKENS and not ignores_window


def _attention_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the problems with the sizes of the attention."""
    sizes = AttentionSizes.from_header(header)
    if header.tensors and sizes.has_no_heads:
        yield "its attention has no heads"
    if sizes.head_size is not None:
        yield from _head_problems(sizes)
    if sizes.has_latent_attention:
        yield from _latent_attention_problems(sizes)
    if sizes.has_huge_window:
        yield f"its sliding window is {sizes.window} positions"


def _head_problems(sizes: AttentionSizes) -> Iterator[str]:
    """Yield the problems with the sizes of a head."""
    if sizes.has_several_sizes:
        listed = ", ".join(f"{key} {value}" for key, value in sizes.lengths.items())
        yield f"its heads have several sizes ({listed or sizes.head_size})"
    if sizes.has_impossible_rotary_size:
        yield (
            f"{sizes.rotary_size} values of each head are rotary, but a head has {sizes.key_size}"
        )
    if sizes.has_empty_heads:
        yield "its heads have a size of 0"


def _latent_attention_problems(sizes: AttentionSizes) -> Iterator[str]:
    """Yield the problems with the sizes that DeepSeek's graph assumes: one key head, whose size is
    that of its compressed part plus its rotary part.
    """
    if sizes.kv_heads != 1:
        yield f"its compressed keys have {sizes.kv_heads} heads"
    if sizes.has_misfit_compressed_keys:
        key = sizes.lengths.get(KEY_LENGTH, 0)
        yield (
            f"its compressed keys have {key} values and its full keys {sizes.full_key_length}, "
            f"of which {sizes.rotary_size or key} are rotary"
        )


def _type_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the tensors with types that llama.cpp cannot compute with."""
    for tensor in header.tensors:
        is_vector = tensor.elements == tensor.columns
        is_unsupported = tensor.type in UNSUPPORTED_TYPES or (
            is_vector and tensor.type not in ggml.FLOAT_TYPES
        )
        if is_unsupported and not any(name in tensor.name for name in INTEGER_TENSORS):
            yield f"tensor {tensor.name} is stored as {tensor.type}"


def _convolution_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the biases of convolutions that are missing, although the graph adds them."""
    if header.architecture not in ARCHS_WITH_CONVOLUTION_BIAS:
        return
    names = {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        bias = tensor.name.removesuffix("weight") + "bias"
        if tensor.name.endswith(".ssm_conv1d.weight") and bias not in names:
            yield f"tensor {bias} is missing"


def _expert_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the problems with the numbers of experts and of groups of experts."""
    count, groups = header.get_int("expert_count") or 0, header.get_int("expert_group_count") or 0
    used = max(_as_list(header.metadata.get(f"{header.architecture}.expert_used_count")), default=0)
    gating = header.get_int("expert_gating_func") or 0
    if not 0 <= gating <= MAX_GATING:
        yield f"its expert_gating_func is {gating}; 0 to {MAX_GATING} are allowed"
    if count > MAX_EXPERTS or used > count or (count and not used):
        yield f"it uses {used} of {count} experts (at most {MAX_EXPERTS})"
    if groups and groups >= count:
        yield f"it has {groups} groups of {count} experts"
    elif groups > 1:
        used_groups = header.get_int("expert_group_used_count") or 0
        if count % groups or not 0 < used_groups < groups:
            yield f"it picks {used_groups} of {groups} groups of {count} experts"


def _setting_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the problems with other numbers in the metadata."""
    for key in EPSILON_KEYS:
        value = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(value, float) and not 0 <= value < math.inf:
            yield f"{key} is {value}"
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in ROPE_SCALINGS:
        yield f"its rope scaling {scaling!r} is unknown"


def _vocabulary_problems(header: "ModelHeader") -> Iterator[str]:
    """Yield the problems with the vocabulary."""
    tokenizer, tokens = header.tokenizer, header.metadata.get("tokenizer.ggml.tokens")
    if (
        tokenizer in ("none", "no_vocab")
        or not isinstance(tokens, GgufArray)
        or tokens.kind != "string"
    ):
        return
    if tokens.count > MAX_TOKENS:
        yield f"its vocabulary has {tokens.count} tokens"
        return
    words = tokens.read_strings()
    distinct_words = set(words)
    # llama.cpp cuts tokens at the first zero byte, and gives empty tokens a text.
    if b"" in distinct_words or b"\0" in b"".join(words):
        cut_words = (word.partition(b"\0")[0] for word in words)
        words = [word or b"[EMPTY_%d]" % index for index, word in enumerate(cut_words)]
        distinct_words = set(words)
    if len(distinct_words) != len(words):
        yield f"its vocabulary repeats {len(words) - len(distinct_words)} tokens"
    if tokenizer == "t5":
        yield from _unigram_problems(header, words)
    if tokenizer == "llama":
        missing = [
            byte
            for byte in range(256)
            if b"<0x%02X>" % byte not in distinct_words and bytes([byte]) not in distinct_words
        ]
        if missing:
            yield f"its vocabulary has no token for {len(missing)} of the 256 bytes"
    pre = header.metadata.get("tokenizer.ggml.pre")
    for name, has_no_default in (
        ("bos", tokenizer in TOKENIZERS_WITHOUT_BOS or pre in PRE_TOKENIZERS_WITHOUT_BOS),
        ("eos", tokenizer in TOKENIZERS_WITHOUT_EOS),
    ):
        token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        is_missing = not isinstance(token_id, int) or token_id >= len(words)
        if (
            header.metadata.get(f"tokenizer.ggml.add_{name}_token") is True
            and has_no_default
            and is_missing
        ):
            yield f"it adds a {name} token but has none"


def _unigram_problems(header: "ModelHeader", words: list[bytes]) -> Iterator[str]:
    """Yield the problems with a Unigram vocabulary. `words` are the tokens as bytes.

    llama.cpp follows the character rules without bounds checks, and it stores pieces in a tree that
    is as deep as the longest piece.
    """
    if max(map(len, words), default=0) > MAX_PIECE_BYTES:
        longest = max(map(len, words))
        yield f"its vocabulary has a piece of {longest} bytes; the limit is {MAX_PIECE_BYTES}"
    rules = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if rules is None or (isinstance(rules, GgufArray) and not rules.count):
        return
    try:
        if (
            not isinstance(rules, GgufArray)
            or rules.kind not in ("int8", "uint8")
            or rules.nbytes > charsmap.MAX_BYTES
        ):
            raise ValueError("it is not an array of bytes, or too long")
        charsmap.parse_charsmap(rules.read_bytes())
    except ValueError as error:
        yield f"its precompiled_charsmap is damaged: {error}"
