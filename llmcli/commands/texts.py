"""What a calibration reads: files of the user's, or the text that ships, its talks written in the
model's own template.

The text that ships (quant/texts/calibration) is some 67,000 of SmolLM2's tokens: this project's own
words and code, essays, talks, mathematics and twenty-one languages written for it, and pieces of
five of Shakespeare's plays, none of which is among those that eval reads. It knows texts and
tokens, and nothing of what is gathered from them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmcli.commands.eval import words_of
from llmcli.commands.scorers import Side
from llmcli.errors import UserError
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.template import Template
from llmcli.types import Message
from quant import evaluate
from quant.evaluate import Chunks

if TYPE_CHECKING:
    from llmcli.runtime.binding.model import Model
    from llmcli.ui import UI

SHIPPED = "the text that ships"
TALKS = "talks.json"


@dataclass(frozen=True, slots=True)
class Text:
    """Words to be read. `special`: control tokens in them are meant as such. `name` is told in the
    file.
    """

    name: str
    words: str
    special: bool = False


def given(paths: Sequence[Path]) -> list[Text]:
    """The user's files, control tokens in them being text; none may be the one that eval reads."""
    texts = []
    for path in paths:
        words, name = words_of(path)
        if words == words_of(None)[0]:
            why = f"{name} is the text that eval reads: nothing may be calibrated with it"
            raise UserError(why, hint="another --text")
        texts.append(Text(name, words))
    return texts


def shipped(side: Side, model: "Model", ui: "UI") -> list[Text]:
    """Prose, code, languages and mathematics, and talks in the model's template."""
    folder = resources.files("quant") / "texts" / "calibration"
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".txt"))
    texts = [
        Text(SHIPPED, (folder / name).read_text(encoding="utf-8").removesuffix("\n"))
        for name in files
    ]
    talks = json.loads((folder / TALKS).read_text(encoding="utf-8"))
    return [*texts, Text(SHIPPED, "".join(_rendered(talks, side, model, ui)), special=True)]


def digest() -> bytes:
    """All of the text that ships, to tell it from another version's."""
    folder = resources.files("quant") / "texts" / "calibration"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return b"".join(file.read_bytes() for file in files if file.is_file())


def _rendered(talks: list[list[list[str]]], side: Side, model: "Model", ui: "UI") -> Iterator[str]:
    """Each talk as the model would read it; plainly where it has no template, or one that fails."""
    source = side.header.metadata.get("tokenizer.chat_template")
    template = (
        Template(str(source), bos=model.word(model.bos), eos=model.word(model.eos))
        if source
        else None
    )
    system = template is not None and template.accepts_system()
    for number, talk in enumerate(talks):
        messages = [Message(role, content) for role, content in talk]
        if template is not None:
            try:
                told = [message for message in messages if system or message.role != "system"]
                yield template.render(told, add_generation_prompt=False)
                continue
            except UserError as error:
                ui.note(
                    f"talk {number + 1} and those behind it are read without a template: {error}"
                )
                template = None
        yield "\n\n".join(f"{message.role}: {message.content}" for message in messages) + "\n\n"


def chunks(
    side: Side, paths: Sequence[Path], most: int | None, seed: int | None, ui: "UI"
) -> tuple[Chunks, tuple[str, ...]]:
    """The chunks that are to be read, and the names of their texts.

    All of the texts' tokens one behind the other are cut into chunks, as llama-imatrix does. `most`
    takes the first of them, or with a `seed` the first of a shuffled order; of the text that ships
    they are always shuffled, so that few chunks are of all kinds.
    """
    n_ctx = side.options.ctx_size
    assert n_ctx
    with open_model(side.header.path, gpu_layers=0, vocab_only=True) as model:
        texts = given(paths) if paths else shipped(side, model, ui)
        found = [token for text in texts for token in _tokens(side, model, text)]
    whole = evaluate.chunks(found, n_ctx).ids
    if seed is not None or not paths:
        whole = whole[np.random.default_rng(seed or 0).permutation(len(whole))]
    return Chunks(whole[:most]), tuple(dict.fromkeys(text.name for text in texts))


def _tokens(side: Side, model: "Model", text: Text) -> list[int]:
    """As llama-imatrix: BOS as the file says, and no EOS behind it. A template writes its own."""
    bos = model.word(model.bos)
    own = text.special and bos and text.words.startswith(bos)
    found = model.tokenize(text.words, special=text.special, add_special=not own)
    if (
        side.header.metadata.get("tokenizer.ggml.add_eos_token")
        and found
        and found[-1] == model.eos
    ):
        found.pop()
    return found
