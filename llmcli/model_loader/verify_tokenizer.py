"""Verifies a converted tokenizer against llama.cpp before any weight is written."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quant.source.source import Source


def verify_tokenizer(source: "Source", tokenizer: "Path", pre: str | None = None) -> "Source":
    """Return a checkpoint's source with its vocabulary verified against the folder's tokenizer.

    The vocabulary is written to a temporary file, which llama.cpp loads without weights. Raises
    UserError if llama.cpp encodes text differently; adds a warning if turns of the chat template do
    not end with a stop token.
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
