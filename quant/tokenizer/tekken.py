"""Reads Mistral's tekken.json: the expression that splits text, the pieces of bytes by rank, and
the special tokens, which have the first rows.

Follows Tekkenizer of mistral-common and MistralVocab of the gguf package.
"""

import base64
from collections.abc import Mapping
from typing import Any

from quant.tokenizer import byte_ranks
from quant.tokenizer.sentencepiece_model import MAX_PIECES

FILE = "tekken.json"
# The special tokens of files of version 3 and before, which do not list them.
OLD_SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
# Settings for a folder whose tokenizer_config.json does not name these tokens.
SETTINGS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
POST_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ],
}
Json = Mapping[str, Any]


def read_tekken(values: Json, location: str) -> dict[str, Any]:
    """Return the content of a tekken.json as that of a tokenizer.json. Raises UserError, which
    names `location`, if it is damaged.
    """
    settings = values.get("config")
    settings = settings if isinstance(settings, dict) else {}
    pattern = settings.get("pattern")
    size, special_count = (
        _count(settings, name, location)
        for name in ("default_vocab_size", "default_num_special_tokens")
    )
    if not isinstance(pattern, str) or special_count >= size:
        raise byte_ranks.make_damage_error(location, "has no pattern, or no rows for pieces")
    listed = values.get("vocab")
    if not isinstance(listed, list) or len(listed) < size - special_count:
        raise byte_ranks.make_damage_error(
            location, f"has fewer than {size - special_count:,} pieces"
        )
    pieces = [
        _piece(item, rank, location) for rank, item in enumerate(listed[: size - special_count])
    ]
    byte_ranks.check_pieces(pieces, location)
    special = _specials(values, special_count, location)
    texts = {text: row for row, text in special.items()}
    post_processor = None
    if "<s>" in texts:
        start = {"id": "<s>", "ids": [texts["<s>"]], "tokens": ["<s>"]}
        post_processor = POST_PROCESSOR | {"special_tokens": {"<s>": start}}
    return byte_ranks.build_tokenizer_json(pieces, special_count, special, pattern, post_processor)


def _count(settings: Json, name: str, location: str) -> int:
    """Return a positive number of the settings."""
    value = settings.get(name)
    if type(value) is not int or not 0 < value <= MAX_PIECES:
        raise byte_ranks.make_damage_error(location, f"has no valid {name}")
    return value


def _piece(item: Any, rank: int, location: str) -> bytes:
    """Return the bytes of an entry of the vocabulary, which must have this rank."""
    try:
        if item["rank"] != rank:
            raise ValueError
        return base64.b64decode(item["token_bytes"], validate=True)
    except (TypeError, KeyError, ValueError):
        raise byte_ranks.make_damage_error(location, f"has no valid piece of rank {rank}") from None


def _specials(values: Json, count: int, location: str) -> dict[int, str]:
    """Return the texts of the special tokens by row. Rows without one are filled up as in
    mistral-common.
    """
    listed = values.get("special_tokens")
    if listed is None:
        special = dict(enumerate(OLD_SPECIALS[:count]))
    else:
        special = {}
        for item in listed if isinstance(listed, list) else [None]:
            match item:
                case {"rank": int(rank), "token_str": str(text)} if 0 <= rank < count and text:
                    special[rank] = text
                case _:
                    raise byte_ranks.make_damage_error(
                        location, "has a special token without a rank or a text"
                    )
    special = {row: special.get(row, f"<SPECIAL_{row}>") for row in range(count)}
    if len(set(special.values())) < count:
        raise byte_ranks.make_damage_error(location, "has the same special token twice")
    return special
