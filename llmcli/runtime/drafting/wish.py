"""What a user wants guessed, in the words of the flags, and what this model, machine and cache make
of it.

`auto` guesses only where nobody can tell by the text: on a CPU, with quantized K and V, every row
of a pass has bit for bit the logits that it has alone (the start-up measurement looks), so that a
seed gives the same text with and without guesses. With floats in the cache llama.cpp computes one
row another way than several; near ties then fall otherwise, now and then, and whoever asks for
guesses (`on`, or a draft model) accepts that.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmcli.errors import UserError
from llmcli.runtime.binding.context import Context, ContextOptions, open_context
from llmcli.runtime.binding.devices import gpu_free
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.base import Tools
from llmcli.runtime.drafting.curve import MOST, WIDTHS, Curve, measure
from llmcli.runtime.drafting.model import CHUNK
from llmcli.runtime.drafting.pace import MARGIN
from llmcli.runtime.drafting.vocabulary import refuse_other
from llmcli.runtime.request import RunOptions
from llmcli.runtime.strategies.base import Speculation, Vocabulary
from quant import container
from quant.container import Header

NGRAM = ("auto", "on", "off")
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Drafting:
    """`ngram`: guess what stood behind the same words before; `model`: a smaller model's file that
    guesses.
    """

    ngram: str = "auto"
    model: Path | None = None

    @property
    def asked(self) -> bool:
        """Whether somebody asked for guesses."""
        return self.ngram == "on" or self.model is not None

    def outputs(self, options: RunOptions, gpu: bool) -> int:
        """Rows of logits that passes will ask for: 1 where nothing can be guessed."""
        return MOST if self.asked or (self.ngram == "auto" and _exact(options, gpu)) else 1


NO_DRAFTING = Drafting("off")


def parse(text: str) -> str:
    """A value of --ngram-draft; raises UserError."""
    if text.lower() not in NGRAM:
        raise UserError(
            f"ngram_draft is {text!r}", hint=f"--ngram-draft takes one of: {', '.join(NGRAM)}"
        )
    return text.lower()


def on_gpu(layers: int) -> bool:
    """Whether a GPU computes any of it."""
    return layers != 0 and gpu_free() is not None


def _exact(options: RunOptions, gpu: bool) -> bool:
    """Whether rows of a pass may be alike at any depth; the measurement looks at a shallow one."""
    return not gpu and options.cache_type_k not in FLOATS and options.cache_type_v not in FLOATS


@contextmanager
def speculation(
    wish: Drafting,
    header: Header,
    model: Model,
    context: Context,
    options: RunOptions,
    gpu_layers: int,
) -> Iterator[Speculation | None]:
    """What guesses are made with over an empty context; None where they are not wanted, or cannot
    pay.

    The draft model is opened as the model was (`options`) and computes where the model does.
    Raises Refusal where somebody asked for what the memory cannot do, or for another vocabulary.
    """
    if context.recurrent and wish.asked:
        raise UserError(
            "guessed tokens must be taken back, and this model's recurrent state cannot",
            hint="leave out --model-draft" if wish.model else "leave out --ngram-draft on",
        )
    room = min(MOST, context.n_outputs, context.n_batch)
    if wish == NO_DRAFTING or room < WIDTHS[0] or context.recurrent:
        yield None
        return
    with ExitStack() as opened:
        draft = (
            opened.enter_context(_draft(wish.model, header, context, options, gpu_layers))
            if wish.model
            else None
        )
        curve = measure(context, room)
        alike = curve.equal if _exact(options, on_gpu(gpu_layers)) else 0
        most = room if wish.asked and not options.reproducible else alike
        words = Vocabulary(model.piece, model.ends, model.n_vocab)
        tools = Tools(wish.ngram == "on" or (wish.ngram == "auto" and most > 0), draft, words)
        kinds = sorted(drafters().values(), key=lambda kind: kind.order)
        made = tuple(drafter for kind in kinds if (drafter := kind.made(tools)))
        guesses = Speculation(made, curve, most, alike, options.reproducible)
        yield guesses if made and _pays(curve, most) else None


def draft_options(context: ContextOptions) -> ContextOptions:
    """What a draft model's context is made with, beside another."""
    return ContextOptions(
        context.n_ctx,
        CHUNK,
        CHUNK,
        1,
        context.n_threads,
        context.n_threads_batch,
        flash_attn=context.flash_attn,
        n_outputs=WIDTHS[0],
    )


@contextmanager
def _draft(
    path: Path, header: Header, context: Context, options: RunOptions, gpu_layers: int
) -> Iterator[tuple[Context, Curve]]:
    """The draft model's context and what its passes cost."""
    other = container.read(path)
    container.check(other)
    refuse_other(header, other)
    assert options.threads
    beside = ContextOptions(
        context.n_ctx,
        n_threads=options.threads,
        n_threads_batch=options.threads_batch or options.threads,
        flash_attn=options.flash_attn,
    )
    wanted = draft_options(beside)
    gpu_layers = -1 if gpu_layers else 0
    with (
        open_model(path, gpu_layers=gpu_layers, latent=other.latent) as model,
        open_context(model, wanted) as made,
    ):
        if made.recurrent:
            raise UserError(
                f"{path.name} cannot draft: guessed tokens must be taken back, and its recurrent state cannot",
                hint="leave out --model-draft",
            )
        yield made, measure(made, WIDTHS[0])


def _pays(curve: Curve, most: int) -> bool:
    """Whether any pass would pay if all its guesses were right."""
    return any(width * curve.one > MARGIN * curve(width) for width in WIDTHS if width <= most)
