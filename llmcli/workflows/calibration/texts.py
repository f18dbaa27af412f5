"""The texts that calibration reads: the user's files, or the built-in text with its chats in the
model's template.

The built-in text (quant/texts/calibration) has about 67,000 tokens of SmolLM2: prose and code of
this project, essays, chats, mathematics, twenty-one languages, and parts of five plays of
Shakespeare's that eval does not read.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.text.chat_template import Template
from llmcli.types import Message
from llmcli.workflows.evaluation.models import Side
from llmcli.workflows.evaluation.text import words_of
from quant.evaluation import evaluate
from quant.evaluation.evaluate import Chunks

if TYPE_CHECKING:
    from llmcli.runtime.binding.model import Model
    from llmcli.ui import UI

SHIPPED = "the text that ships"
TALKS = "talks.json"


@dataclass(frozen=True, slots=True)
class Text:
    """A text to be read. `parses_special`: control tokens in it are parsed; `name` is stored in the
    statistics file.
    """

    name: str
    words: str
    special: bool = False


def given(paths: Sequence[Path]) -> list[Text]:
    """Return the user's files, whose control tokens are plain text.

    Raises UserError for the text that eval reads.
    """
    calibration_texts = []
    for path in paths:
        content, name = words_of(path)
        if content == words_of(None)[0]:
            raise UserError(
                f"{name} is the text that eval reads, so it cannot be used for calibration",
                hint="use another --text",
            )
        calibration_texts.append(Text(name, content))
    return calibration_texts


def shipped(side: Side, model: "Model", ui: "UI") -> list[Text]:
    """Return the built-in text: prose, code, languages, mathematics, and chats in the model's
    template.
    """
    folder = resources.files("quant") / "texts" / "calibration"
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".txt"))
    texts = [
        Text(SHIPPED, (folder / name).read_text(encoding="utf-8").removesuffix("\n"))
        for name in files
    ]
    chats = json.loads((folder / TALKS).read_text(encoding="utf-8"))
    return [*texts, Text(SHIPPED, "".join(_render_chats(chats, side, model, ui)), special=True)]


def digest() -> bytes:
    """Return all bytes of the built-in text, which identify its version."""
    folder = resources.files("quant") / "texts" / "calibration"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return b"".join(file.read_bytes() for file in files if file.is_file())


def _render_chats(
    talks: list[list[list[str]]], side: Side, model: "Model", ui: "UI"
) -> Iterator[str]:
    """Yield each chat in the model's template; as plain text if there is none or it fails."""
    source = side.header.metadata.get("tokenizer.chat_template")
    template = (
        Template(str(source), bos=model.word(model.bos), eos=model.word(model.eos))
        if source
        else None
    )
    system = template is not None and template.accepts_system()
    for number, chat in enumerate(talks):
        messages = [Message(role, content) for role, content in chat]
        if template is not None:
            try:
                accepted = [message for message in messages if system or message.role != "system"]
                yield template.render(accepted, add_generation_prompt=False)
                continue
            except UserError as error:
                ui.note(f"chats from number {number + 1} on are read without a template: {error}")
                template = None
        yield "\n\n".join(f"{message.role}: {message.content}" for message in messages) + "\n\n"


def chunks(
    side: Side, paths: Sequence[Path], most: int | None, seed: int | None, ui: "UI"
) -> tuple[Chunks, tuple[str, ...]]:
    """Return the chunks to read, shaped `[chunks, ctx_size]`, and the names of their texts.

    All tokens of the texts are concatenated and cut into chunks, as llama-imatrix does.
    `max_chunks` limits the number of chunks; with a `seed` they are shuffled first. Chunks of the
    built-in text are always shuffled, so that a few chunks cover every kind of text. Raises
    UserError.
    """
    n_ctx = side.options.ctx_size
    assert n_ctx
    with open_model(side.header.path, gpu_layers=0, vocab_only=True) as model:
        texts = given(paths) if paths else shipped(side, model, ui)
        token_ids = [token for text in texts for token in _tokens(side, model, text)]
    chunk_ids = evaluate.chunks(token_ids, n_ctx).ids
    if seed is not None or not paths:
        chunk_ids = chunk_ids[np.random.default_rng(seed or 0).permutation(len(chunk_ids))]
    return Chunks(chunk_ids[:most]), tuple(dict.fromkeys(text.name for text in texts))


def _tokens(side: Side, model: "Model", text: Text) -> list[int]:
    """Tokenize as llama-imatrix does: BOS follows the file, no EOS at the end; a template writes
    its own BOS.
    """
    bos = model.word(model.bos)
    has_bos = text.special and bos and text.words.startswith(bos)
    token_ids = model.tokenize(text.words, special=text.special, add_special=not has_bos)
    if (
        side.header.metadata.get("tokenizer.ggml.add_eos_token")
        and token_ids
        and token_ids[-1] == model.eos
    ):
        token_ids.pop()
    return token_ids
