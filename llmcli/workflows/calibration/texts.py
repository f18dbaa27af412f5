"""The texts for calibration: the user's files, or the built-in text. The chats in the built-in text
are formatted with the model's template.

The built-in text (quant/texts/calibration) consists of prose and code of this project, essays,
chats, mathematics and twenty-one languages. The text of `eval` is of none of these kinds.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.runner import open_template
from llmcli.runtime.text.prompt_tokens import begins_with, tokenize_prompt
from llmcli.runtime.text.tracked_text import UNKNOWN_SOURCE, TrackedText, join_texts
from llmcli.types import Message
from llmcli.workflows.evaluation.models import EvaluationSide
from llmcli.workflows.evaluation.text import read_evaluation_text
from quant.calibration.text_overlap import sample_windows
from quant.calibration.text_record import TextRecord
from quant.evaluation import evaluate
from quant.evaluation.evaluate import TextChunks

if TYPE_CHECKING:
    from llmcli.runtime.binding.model import Model
    from llmcli.ui import UI

BUILTIN_NAME = "the text that ships"
CHATS_FILE = "talks.json"
CHATS_KIND = "chats"


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text for calibration. `name`: the name that statistics files record. `is_rendered`: whether
    a chat template has written it, whose own words become control tokens.
    """

    name: str
    content: str
    is_rendered: bool = False


def read_user_texts(paths: Sequence[Path]) -> list[CalibrationText]:
    """Return the user's files. The names of control tokens in them are plain text.

    Raises UserError for the built-in text of `eval`, because a model must not be evaluated on its
    calibration text.
    """
    calibration_texts = []
    for path in paths:
        text = read_evaluation_text(path)
        if text.content == read_evaluation_text(None).content:
            raise UserError(
                f"{text.name} is the text that eval reads, so it cannot be used for calibration",
                hint="use another --text",
            )
        calibration_texts.append(CalibrationText(text.name, text.content))
    return calibration_texts


def builtin_texts(side: EvaluationSide, model: "Model", ui: "UI") -> list[CalibrationText]:
    """Return the built-in text in parts: prose, code, languages, mathematics, and chats that are
    formatted with the model's template.
    """
    folder = resources.files("quant") / "texts" / "calibration"
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".txt"))
    texts = [
        CalibrationText(
            BUILTIN_NAME, (folder / name).read_text(encoding="utf-8").removesuffix("\n")
        )
        for name in files
    ]
    chats = json.loads((folder / CHATS_FILE).read_text(encoding="utf-8"))
    return [
        *texts,
        CalibrationText(
            BUILTIN_NAME, join_texts(list(_render_chats(chats, side, model, ui))), is_rendered=True
        ),
    ]


def describe_texts(paths: Sequence[Path]) -> TextRecord:
    """Return what statistics record about the user's files, or about the built-in text without
    any. Raises UserError if a file cannot be read.
    """
    if paths:
        user_texts = read_user_texts(paths)
        windows = sample_windows(text.content for text in user_texts)
        return TextRecord(tuple(dict.fromkeys(text.name for text in user_texts)), (), windows)
    return _describe_builtin_text()


@cache
def _describe_builtin_text() -> TextRecord:
    folder = resources.files("quant") / "texts" / "calibration"
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    chats = json.loads(files.pop(CHATS_FILE))
    kinds = {name.partition("-")[0].removesuffix(".txt") for name in files} | {CHATS_KIND}
    contents = [content for chat in chats for _, content in chat]
    windows = sample_windows([*files.values(), *contents])
    return TextRecord((BUILTIN_NAME,), tuple(sorted(kinds)), windows)


def digest_texts(paths: Sequence[Path]) -> str:
    """Return the sha256 of the user's files, or of the built-in text without any. Raises UserError
    if a file cannot be read.
    """
    content = (
        b"".join(text.content.encode() for text in read_user_texts(paths))
        if paths
        else _builtin_bytes()
    )
    return hashlib.sha256(content).hexdigest()


def _builtin_bytes() -> bytes:
    folder = resources.files("quant") / "texts" / "calibration"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return b"".join(file.read_bytes() for file in files if file.is_file())


def _render_chats(
    chats: list[list[list[str]]], side: EvaluationSide, model: "Model", ui: "UI"
) -> Iterator[str]:
    """Yield the text of each chat, formatted with the model's template. Without a template, or
    after the template has failed, yield plain text. Each chat is a list of (role, content) pairs.
    """
    template = open_template(side.header, model)
    for number, chat in enumerate(chats):
        messages = [Message(role, content) for role, content in chat]
        if template is not None:
            try:
                yield template.render(messages, add_generation_prompt=False)
                continue
            except UserError as error:
                ui.note(f"chats from number {number + 1} on are read without a template: {error}")
                template = None
        text = "\n\n".join(f"{message.role}: {message.content}" for message in messages) + "\n\n"
        yield TrackedText.from_source(text, UNKNOWN_SOURCE)


def calibration_chunks(
    side: EvaluationSide, paths: Sequence[Path], max_chunks: int | None, seed: int | None, ui: "UI"
) -> tuple[TextChunks, TextRecord]:
    """Return the chunks to read, as token ids of shape `[chunks, ctx_size]`, and what statistics
    record about the texts.

    The tokens of all texts are concatenated and cut into chunks, as in llama-imatrix. `paths`: the
    user's texts; empty: the built-in text. `max_chunks`: the number of chunks; None: all. `seed`:
    seed of a shuffle of the chunks; None: no shuffle. Chunks of the built-in text are always
    shuffled, so that a few chunks already contain every kind of text. Raises UserError.
    """
    n_ctx = side.options.ctx_size
    assert n_ctx
    with open_model(side.header.path, vocab_only=True) as model:
        texts = read_user_texts(paths) if paths else builtin_texts(side, model, ui)
        token_ids = [token for text in texts for token in _tokens(side, model, text)]
    chunk_ids = evaluate.split_text(token_ids, n_ctx).ids
    if seed is not None or not paths:
        chunk_ids = chunk_ids[np.random.default_rng(seed or 0).permutation(len(chunk_ids))]
    return TextChunks(chunk_ids[:max_chunks]), describe_texts(paths)


def _tokens(side: EvaluationSide, model: "Model", text: CalibrationText) -> list[int]:
    """Return the tokens of a text as llama-imatrix does: BOS is added if the model file requests
    it, and EOS is never added. BOS is not added if the chat template has already written it.
    """
    bos = model.token_text(model.bos)
    has_bos = text.is_rendered and begins_with(text.content, bos)
    token_ids = (
        tokenize_prompt(model, text.content, not has_bos, frozenset)
        if text.is_rendered
        else model.tokenize(text.content, special=False, add_special=True)
    )
    if (
        side.header.metadata.get("tokenizer.ggml.add_eos_token")
        and token_ids
        and token_ids[-1] == model.eos
    ):
        token_ids.pop()
    return token_ids
