"""Training texts, held-out texts and tokenizer of train_teacher.py.

The texts are Wikipedia articles, tinyshakespeare, and Python's library with its language reference.
The last tenth of every text is held out from training and calibration.
"""

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD = 0.1  # share of every text that is held out at its end
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
)  # calibration uses no plays: they are the second domain of the evaluation
PORTIONS, PORTION, PIECE = (
    3,
    200_000,
    2_000,
)  # calibration texts; characters of each kind in a text, and in a piece


@dataclass(frozen=True)
class Corpus:
    """Tokens of every text for training and held out, U16 `[tokens]`."""

    trained: dict[str, np.ndarray[Any, Any]]
    held: dict[str, np.ndarray[Any, Any]]

    def batch(self, seed: int, step: int, tokens: int, ctx: int) -> np.ndarray[Any, Any]:
        """Return the windows of one step, I64 `[windows, ctx + 1]`, each starting with the end
        token; at least two.
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
    """Write the texts and the tokenizer to `folder`; return the tokens."""
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
    """Return a calibration text: pieces of each kind in turn, from a range that no other portion
    uses.
    """
    pieces = []
    for name in CALIBRATED:
        start = (len(trained[name]) - PORTIONS * PORTION) // 2 + number * PORTION
        stretch = trained[name][start : start + PORTION]
        pieces.append([stretch[at : at + PIECE] for at in range(0, PORTION, PIECE)])
    return "\n".join(piece for turn in zip(*pieces, strict=True) for piece in turn)


def texts(source: Path) -> dict[str, str]:
    """Return texts by name. Code starts with the language reference, then files in the order of
    their names.
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
    )  # so that every kind is in the held-out part
    code = [path.read_text(errors="replace") for path in spread]
    return {
        "wiki": (source / "wiki.valid.tokens").read_text(),
        "plays": (source / "tinyshakespeare.txt").read_text(),
        "code": "\n".join([prose(topics), *code]),
    }


def prose(topics: Path) -> str:
    """Return the language reference that `help()` shows, without its quoting."""
    found: dict[str, object] = {}
    exec(topics.read_text(), found)  # the file is part of Python and contains only a dict of texts
    return "\n".join(str(text) for text in dict(found["topics"]).values())  # type: ignore[call-overload]


def learn(texts: list[str], words: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer like SmolLM's: single digits, GPT-2's word pattern."""
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
    ]  # so that no kind of text dominates the vocabulary
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
