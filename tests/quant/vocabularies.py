"""Tokenizer folders for tests, and their conversion with verification.

Some folders are reconstructed from GGUF files of llama.cpp that have only a vocabulary. Files next
to them have test strings with the expected token ids.
"""

import json
import struct
from pathlib import Path
from typing import Any

from llmcli.runtime.binding.model import open_model
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.gguf.layout import encode_entry, lay_out_file
from quant.model_file import load_checks, read_header
from quant.tokenizer import pre_tokenizer, vocabulary
from quant.tokenizer.pre_tokenizer import CJK, DEEPSEEK, LLAMA3, QWEN2, QWEN35
from quant.tokenizer.verify import verify
from quant.tokenizer.verify.verify import VocabularyVerification

SHARED_VOCABULARIES = Path(__file__).parents[3] / "shared" / "assets" / "vocab"
SEPARATOR = "\n__ggml_vocab_test__\n"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# The pre-tokenizer steps of each published tokenizer.json, and its setting ignore_merges.
STEPS: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": (("gpt2",), False),
    "mpt": (("gpt2",), False),
    "starcoder": (("digits", "gpt2"), False),
    "refact": (("digits", "gpt2"), False),
    "command-r": (("digits", "gpt2"), False),
    "llama-bpe": ((LLAMA3,), True),
    "qwen2": ((QWEN2,), False),
    "qwen35": ((QWEN35,), False),
    "deepseek-llm": ((*DEEPSEEK, "digits"), False),
    "deepseek-coder": (("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, "digits"), False),
    "falcon": (("punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]"), False),
}
SENTENCEPIECE_MODELS = ("llama-spm", "phi-3")


def convert_and_verify(
    folder: Path, size: int | None, out: Path, pre: str | None = None, **changes: Any
) -> VocabularyVerification:
    """Convert a folder's vocabulary to `out`, load it with llama.cpp, and verify its token ids.

    `size` is the vocabulary size of the config, or None for a config without it. `changes` replace
    tokenizer.ggml entries of the file, each by a pair of type and value.
    """
    config = CheckpointConfig({} if size is None else {"vocab_size": size}, "config.json")
    loaded = vocabulary.load_vocabulary(
        CheckpointFolder(folder), config, pre, size_from_tokenizer=size is None
    )
    entries = {"general.architecture": encode_entry("string", "llama")} | dict(loaded.entries)
    entries |= {f"tokenizer.ggml.{name}": encode_entry(*change) for name, change in changes.items()}
    out.write_bytes(lay_out_file(list(entries.items()), [], 32).header)
    header = read_header.read_header(out)
    load_checks.check_loadable(header)
    with open_model(out, vocab_only=True) as model:
        return verify.verify_vocabulary(folder, header.metadata, model, pre)


def vocabulary_files() -> list[Path]:
    """Return the paths of all vocabulary files with expected ids.

    They are in the shared assets and, if it exists, in the source distribution of llama.cpp.
    """
    paths = {
        path.name: path
        for folder in (_sources(), SHARED_VOCABULARIES)
        if folder
        for path in folder.glob("ggml-vocab-*.gguf")
    }
    return [
        path for _, path in sorted(paths.items()) if path.with_name(f"{path.name}.out").is_file()
    ]


def _sources() -> Path | None:
    for folder in (Path(__file__).parents[3], Path(__file__).parents[4]):
        for folder_path in folder.glob("llama_cpp_python-*/vendor/llama.cpp/models"):
            return folder_path
    return None


def expected_ids(path: Path) -> list[tuple[str, list[int]]]:
    """Return the strings and expected token ids that llama.cpp's tests use for a vocabulary."""
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    return [
        (text, [int(number) for number in line.split()])
        for text, line in zip(texts, lines, strict=False)
    ]


def write_tokenizer(path: Path, folder: Path) -> int:
    """Write the tokenizer files of a vocabulary to `folder`, and return the vocabulary size."""
    name, metadata = (
        path.name.removeprefix("ggml-vocab-").removesuffix(".gguf"),
        read_header.read_header(path).metadata,
    )
    tokens, types = (
        metadata[f"tokenizer.ggml.{key}"].read_values() for key in ("tokens", "token_type")
    )
    folder.mkdir()
    if name in SENTENCEPIECE_MODELS:
        scores = metadata["tokenizer.ggml.scores"].read_values()
        (folder / "tokenizer.model").write_bytes(
            build_sentencepiece(list(zip(tokens, scores, types, strict=True)))
        )
        return len(tokens)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    if metadata["tokenizer.ggml.model"] == "bert":
        pieces = [
            token if kind == CONTROL else token[1:] if token[0] == "\u2581" else f"##{token}"
            for token, kind in zip(tokens, types, strict=True)
        ]
        (folder / "tokenizer.json").write_text(json.dumps(wordpiece_tokenizer_json(pieces, added)))
        return len(tokens)
    steps, whole_words_first = STEPS[name]
    words = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != UNUSED
    }
    merges = metadata["tokenizer.ggml.merges"].read_values()
    (folder / "tokenizer.json").write_text(
        json.dumps(bpe_tokenizer_json(words, merges, steps, added, whole_words_first))
    )
    return len(tokens)


def wordpiece_tokenizer_json(
    pieces: list[str], added: list[dict[str, Any]], **normalizer: Any
) -> dict[str, Any]:
    """Return the content of BERT's tokenizer.json with these pieces. `normalizer` replaces settings
    of its normalizer.
    """
    ends = {name: pieces.index(name) for name in ("[CLS]", "[SEP]")}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
            **normalizer,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
            ],
            "special_tokens": {
                name: {"id": name, "ids": [index], "tokens": [name]} for name, index in ends.items()
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
        },
    }


def bpe_tokenizer_json(
    words: dict[str, int],
    merges: list[Any],
    steps: tuple[str, ...],
    added: list[dict[str, Any]],
    whole_words_first: bool,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json with byte-level BPE."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer.build_node(steps),
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words_first,
            "vocab": words,
            "merges": merges,
        },
    }


def build_sentencepiece(
    pieces: list[tuple[str, float, int]], kind: int = 2, **settings: bool | bytes
) -> bytes:
    """Return the bytes of a tokenizer.model with these pieces (text, score, type).

    `kind` is the model type: 1 is unigram, 2 is BPE. `settings` are fields of the trainer and
    normalizer specs. remove_extra_whitespaces is false by default for BPE, as in Llama.
    """
    data = b""
    for text, score, piece in pieces:
        word = _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, piece)
        data += _field(1, word)
    fields = {"remove_extra_whitespaces": kind != 2} | settings
    trainer = _field(3, kind) + b"".join(
        _field(TRAINER[name], fields[name]) for name in fields if name in TRAINER
    )
    normalizer = b"".join(
        _field(NORMALIZER[name], fields[name]) for name in fields if name in NORMALIZER
    )
    return data + _field(2, trainer) + _field(3, normalizer)


TRAINER = {"treat_whitespace_as_suffix": 24, "byte_fallback": 35}
NORMALIZER = {
    "precompiled_charsmap": 2,
    "add_dummy_prefix": 3,
    "remove_extra_whitespaces": 4,
    "escape_whitespaces": 5,
}


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])
