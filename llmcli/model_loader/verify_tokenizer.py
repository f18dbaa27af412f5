"""Check, before any weight is written, that llama.cpp tokenizes with a converted vocabulary as the
checkpoint's own tokenizer does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quant.source.source import Source


def verify_tokenizer(source: "Source", tokenizer: "Path", pre: str | None = None) -> "Source":
    """Compare the vocabulary of `source` in llama.cpp with the tokenizer files in the folder
    `tokenizer`. Return the source with notes about the comparison. `pre`: the name of the
    pre-tokenizer that the user chose.

    llama.cpp loads the vocabulary from a temporary file without weights. The result has a warning
    if the chat template ends messages with a token at which llama.cpp does not stop. Raises
    UserError if llama.cpp tokenizes differently.
    """
    from dataclasses import replace

    from llmcli.model_loader import float_copy
    from llmcli.runtime.binding.model import open_model
    from llmcli.runtime.text import template_check
    from quant.model_file import load_checks, read_header
    from quant.tokenizer.verify import verify

    with float_copy.vocabulary_only_gguf(source) as file:
        header = read_header.read_header(file)
        load_checks.check_loadable(header)
        with open_model(file, vocab_only=True) as model:
            verification = verify.verify_vocabulary(tokenizer, header.metadata, model, pre)
            template = header.metadata.get("tokenizer.chat_template")
            warnings = (
                template_check.check_turn_end(model, template)
                if isinstance(template, str) and template
                else []
            )
    return replace(
        source, notes=(*source.notes, *verification.notes), warnings=(*source.warnings, *warnings)
    )
