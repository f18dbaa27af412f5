"""Opens the model that a REF names: at the start of `chat`, `run` and `serve`, and again for
`/model`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from llmcli import text_input
from llmcli.catalog import catalog, store
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader import rpc_workers
from llmcli.model_loader.opened_model import Opened
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.run_flags import RunFlags
from llmcli.planning import resolve_options, tuned_profile
from llmcli.planning.admission import check_memory
from llmcli.planning.run_plan import RunPlan
from llmcli.runtime import reproducible, runner
from llmcli.runtime.binding.context_options import MAX_SEQUENCES
from llmcli.runtime.compute_thread import open_on_compute_thread
from llmcli.runtime.interrupt import allow_interrupts
from llmcli.runtime.speculation import NO_DRAFTING, DraftSettings
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.ui import UI
from quant.model_file import read_header

TOKENS_PER_ANSWER = 2048  # context tokens per additional answer, if no context size was requested


class ModelSwitcher:
    """Opens models one after the other and keeps the current one open.

    The command-line options apply to every model, except `--quant` and `--chat-template`, which
    apply only to the first. `is_chat`: several answers follow one another; `parallel`: answers at
    once; `must_generate`: False also accepts models made for embeddings; `on_other_thread`: another
    thread computes.
    """

    def __init__(
        self,
        run_flags: RunFlags,
        config: Config,
        ui: UI,
        is_chat: bool,
        parallel: int = 1,
        must_generate: bool = True,
        on_other_thread: bool = False,
    ) -> None:
        resolve_options.validate_options(run_flags.options)
        rpc_workers.join_workers(run_flags.rpc, run_flags.tensor_split, ui)
        self.run_flags, self.config, self.ui = run_flags, config, ui
        self.is_chat, self.parallel, self.must_generate, self.on_other_thread = (
            is_chat,
            parallel,
            must_generate,
            on_other_thread,
        )
        self._template = (
            text_input.read_template(run_flags.chat_template) if run_flags.chat_template else None
        )
        if self._template is not None:
            # otherwise every request to a server would report the error
            ChatTemplate(self._template).check()
        self._held = ExitStack()

    def names(self) -> list[str]:
        """Return the catalog's names and the models on this disk; nothing if the user's catalog is
        invalid.
        """
        try:
            known = [
                *catalog.load(self.config),
                *(manifest.name for manifest in store.manifests(self.config)),
            ]
        except UserError:
            return []
        return sorted(set(known))

    def open(self, ref: str) -> Opened:
        """Open the model that the command line names. Raises UserError."""
        slots = max(self.run_flags.samples, self.run_flags.search.beams, self.parallel)
        return self._open(self._held, ref, self.run_flags.quant, self._template, slots)

    def switch(self, ref: str, beams: int, use: Callable[[Opened], None]) -> None:
        """Open `ref`, pass it to `use`, then close the previous model; after an error the previous
        model stays open.

        Both models are open for a moment: the weights are memory-mapped, but both caches must fit.
        """
        fresh = ExitStack()
        try:
            use(self._open(fresh, ref, None, None, max(self.run_flags.samples, beams)))
        except BaseException:
            fresh.close()
            raise
        before, self._held = self._held, fresh
        before.close()

    def close(self) -> None:
        """Free the model."""
        self._held.close()

    def _open(
        self, stack: ExitStack, ref: str, quant: str | None, template: str | None, slots: int
    ) -> Opened:
        given, ui = self.run_flags, self.ui
        with allow_interrupts():  # an interrupted download or quantization resumes the next time
            model = prepare_model(ref, quant, self.config, ui)
        predict = None if given.predict in (None, -1) else given.predict
        each = (
            (predict or TOKENS_PER_ANSWER)
            if self.parallel > 1
            else predict
            if given.samples > 1
            else None
        )
        header = read_header.read_header(model.path)
        asked = given.options
        if (
            not given.no_profile
            and (
                asked := tuned_profile.apply_profile(
                    header, asked, given.typed, self.config, ui.warn
                )
            ).profile
        ):
            ui.note(f"using profile {asked.profile}; --no-profile ignores it")
        options, gpu_layers = resolve_options.resolve_options(header, asked, ui.warn, slots, each)
        if self.parallel > 1:
            options = replace(options, scoring_outputs=resolve_options.scoring_outputs(header))
        drafting, needed = self._drafting(), slots
        if self.is_chat:
            kept = resolve_options.spare_sequences(header, options)
            several = self.parallel > 1 and kept > 1  # then each cached prefix has its own sequence
            slots = min(MAX_SEQUENCES, slots + kept) if several else max(slots, kept)
        sized = given.options.ctx_size is not None
        wish = RunPlan(model.name, header, options, gpu_layers, drafting, slots, needed, sized)
        wish = check_memory(wish, given.fit, ui.note)
        options = resolve_options.resolve_flash_attention(
            header, wish.options, gpu_layers, self.config, wish.slots, self.parallel
        )
        opening = runner.open_runner(
            model.path,
            options,
            template=template,
            raw=given.raw,
            slots=wish.slots,
            gpu_layers=gpu_layers,
            native_sampling=self.config.native_sampling,
            drafting=drafting,
            needs_text=self.must_generate,
        )
        opened = (
            open_on_compute_thread(partial(stack.enter_context, opening))
            if self.on_other_thread
            else stack.enter_context(opening)
        )
        if options.reproducible:
            ui.note(reproducible.GUARANTEE)
        if drafting.is_requested and opened.engine.resources.speculation is None:
            ui.note(
                "speculative decoding is off: on this machine a pass over several tokens costs as "
                "much as separate passes"
            )
        if opened.template is None and opened.can_generate and not given.raw:
            ui.note(f"{model.name} is a base model without a chat template: it continues the text")
        file_bytes = sum(file.stat().st_size for file in opened.header.files)
        return Opened(model.name, opened, file_bytes, model.system, model.settings)

    def _drafting(self) -> DraftSettings:
        """Return the draft settings; no drafting if several answers are generated at once."""
        given = self.run_flags
        if given.samples > 1 or given.search.beams > 1:
            return NO_DRAFTING
        if given.model_draft is None:
            return DraftSettings(given.ngram_draft)
        with allow_interrupts():
            return DraftSettings(
                given.ngram_draft, prepare_model(given.model_draft, None, self.config, self.ui).path
            )
