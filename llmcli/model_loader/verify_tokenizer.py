"""Check, before any weight is written, that llama.cpp tokenizes with a converted vocabulary as the
checkpoint's own tokenizer does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quant.source.source import Source


def verify_tokenizer(
    source: "Source", tokenizer: "Path", pre: str | None = None, accept_differences: bool = False
) -> "Source":
    """Compare the vocabulary of `source` in llama.cpp with the tokenizer files in the folder
    `tokenizer`. Return the source with notes about the comparison, and with metadata that records
    all differences. `pre`: the name of the pre-tokenizer that the user chose.

    llama.cpp loads the vocabulary from a temporary file without weights. The result has a warning
    if the chat template ends messages with a token at which llama.cpp does not stop. Raises
    UserError if llama.cpp tokenizes differently for an unknown reason, unless `accept_differences`
    is set.
    """
    from dataclasses import replace

    from llmcli.model_loader import float_copy
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.text import template_check
    from quant.gguf.layout import encode_entry
    from quant.model_file import load_checks, read_header
    from quant.source.source import DIFFERING_KEY, KNOWN_DIFFERENCES_KEY
    from quant.tokenizer.verify import verify

    with float_copy.vocabulary_only_gguf(source) as file:
        header = read_header.read_header(file)
        load_checks.check_loadable(header)
        with open_model(file, vocab_only=True) as model:
            verification = verify.verify_vocabulary(
                tokenizer, header.metadata, model, pre, accept_differences
            )
            template = header.metadata.get("tokenizer.chat_template")
            warnings = (
                template_check.check_turn_end(model, template)
                if isinstance(template, str) and template
                else []
            )
    differing = verification.differing
    if differing:
        warnings.append(
            f"llama.cpp encodes text differently from the model's tokenizer, for example "
            f"{differing[0][:60]!r}; the file lists {len(differing)} such strings in {DIFFERING_KEY}"
        )
    records = {KNOWN_DIFFERENCES_KEY: verification.notes, DIFFERING_KEY: differing}
    entries = (
        (key, encode_entry("array:string", texts)) for key, texts in records.items() if texts
    )
    return replace(
        source,
        entries=(*source.entries, *entries),
        notes=(*source.notes, *verification.notes),
        warnings=(*source.warnings, *warnings),
    )
