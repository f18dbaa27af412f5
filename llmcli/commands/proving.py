"""Joins a converted vocabulary with llama.cpp, so that quant can prove it before any weight is
written.

It knows where both ends are: quant compares, the runtime tokenizes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quant.source import Source


def proven(source: "Source", tokenizer: "Path", pre: str | None = None) -> "Source":
    """A checkpoint folder's source, its vocabulary proven against the folder it is from.

    The vocabulary goes into a file of its own, which llama.cpp loads without weights: seconds,
    before minutes. Raises Refusal where llama.cpp encodes otherwise; warns of a chat template whose
    turns do not end.
    """
    from dataclasses import replace

    from llmcli.commands import bases
    from llmcli.runtime import doctor
    from llmcli.runtime.binding.model import open_model
    from quant import container, proof

    with bases.wordlist(source) as file:
        header = container.read(file)
        container.check(header)
        with open_model(file, vocab_only=True) as model:
            found = proof.prove(tokenizer, header.metadata, model, pre)
            template = header.metadata.get("tokenizer.chat_template")
            warnings = (
                doctor.turn_end(model, template) if isinstance(template, str) and template else []
            )
    return replace(
        source, notes=(*source.notes, *found.notes), warnings=(*source.warnings, *warnings)
    )
