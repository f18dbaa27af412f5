"""The texts of a teacher (train_teacher.py): what it is trained on, what is held out, and its
tokenizer.

Prose, plays and code: Wikipedia articles, tinyshakespeare, and Python's own library with its
language reference. The last tenth of every text is held out; nothing of it is trained on or
calibrated with.
"""

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD = 0.1  # share of every text that is held out, at its end
SHARES = {"wiki": 0.35, "plays": 0.2, "code": 0.45}  # of a batch's windows
END = "<|endoftext|>"
SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "encodings",
    "turtledemo",
    "ensurepip",
}
CALIBRATED = (
    "wiki",
    "code",
)  # calibration sees no plays: they are the other domain of an evaluation
PORTIONS, PORTION, PIECE = (
    3,
    200_000,
    2_000,
)  # calibration texts; characters of each kind in one, and of a piece


@dataclass(frozen=True)
class Corpus:
    """Tokens of every text, those trained on and those held out: U16 [tokens]."""

    trained: dict[str, np.ndarray[Any, Any]]
    held: dict[str, np.ndarray[Any, Any]]

    def batch(self, seed: int, step: int, tokens: int, ctx: int) -> np.ndarray[Any, Any]:
        """I64 [windows, ctx + 1]: the windows of one step, each begun by the text's end token; at
        least two.
        """
        chance = np.random.default_rng((seed, step))
        names = chance.choice(
            list(self.trained), max(2, tokens // ctx), p=[SHARES[name] for name in self.trained]
        )
        windows = np.zeros((len(names), ctx + 1), np.int64)
        for row, name in zip(windows, names, strict=True):
            start = chance.integers(len(self.trained[name]) - ctx)
            row[1:] = self.trained[name][start : start + ctx]
        return windows


def prepare(source: Path, folder: Path, words: int) -> Corpus:
    """Write the texts' parts and the tokenizer to `folder`; the tokens of both parts."""
    from tokenizers import Tokenizer

    (folder / "text").mkdir(parents=True, exist_ok=True)
    trained, held = {}, {}
    for name, text in texts(source).items():
        cut = text.rindex("\n", 0, int(len(text) * (1 - HELD))) + 1
        trained[name], held[name] = text[:cut], text[cut:]
        (folder / "text" / f"held-{name}.txt").write_text(held[name])
    for number in range(PORTIONS):
        (folder / "text" / f"calibration-{number}.txt").write_text(portion(trained, number))
    if not (folder / "tokenizer.json").exists():
        learn(list(trained.values()), words, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encoded(text: str) -> np.ndarray[Any, Any]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

    return Corpus(
        *({name: encoded(text) for name, text in part.items()} for part in (trained, held))
    )


def portion(trained: dict[str, str], number: int) -> str:
    """A calibration text: pieces of each kind in turn, from a stretch of their middles that no
    other portion has.
    """
    pieces = []
    for name in CALIBRATED:
        start = (len(trained[name]) - PORTIONS * PORTION) // 2 + number * PORTION
        stretch = trained[name][start : start + PORTION]
        pieces.append([stretch[at : at + PIECE] for at in range(0, PORTION, PIECE)])
    return "\n".join(piece for turn in zip(*pieces, strict=True) for piece in turn)


def texts(source: Path) -> dict[str, str]:
    """Name -> text. Code is in the order of the files' names, with the language reference's topics
    first.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(library.rglob("*.py"))
        if not SKIPPED & set(path.relative_to(library).parts)
    ]
    topics = library / "pydoc_data" / "topics.py"
    spread = np.random.default_rng(0).permutation(
        [path for path in files if path != topics]
    )  # held out: of all kinds
    code = [path.read_text(errors="replace") for path in spread]
    return {
        "wiki": (source / "wiki.valid.tokens").read_text(),
        "plays": (source / "tinyshakespeare.txt").read_text(),
        "code": "\n".join([prose(topics), *code]),
    }


def prose(topics: Path) -> str:
    """The language reference that `help()` shows, without its quoting."""
    found: dict[str, object] = {}
    exec(topics.read_text(), found)  # Python's own library: a dict of texts and nothing else
    return "\n".join(str(text) for text in dict(found["topics"]).values())  # type: ignore[call-overload]


def learn(texts: list[str], words: int, folder: Path) -> None:
    """A byte-level BPE tokenizer in the shape of SmolLM's: digits apart, GPT-2's words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    evenly = [
        text[: min(map(len, texts))] for text in texts
    ]  # no kind of text rules the vocabulary
    tokenizer.train_from_iterator(evenly, trainer)
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": True,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
