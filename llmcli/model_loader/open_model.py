"""Opens the model that a REF names: at the start of `chat`, `run` and `serve`, and again for
`/model`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from llmcli import text_input
from llmcli.catalog import catalog, store
from llmcli.catalog.fetch import FetchedModel
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader import rpc_workers
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.run_flags import RunFlags
from llmcli.planning import resolve_options, tuned_profile
from llmcli.planning.admission import check_memory
from llmcli.planning.run_plan import RunPlan
from llmcli.runtime import reproducible
from llmcli.runtime.binding.context_options import MAX_SEQUENCES
from llmcli.runtime.compute_thread import open_on_compute_thread
from llmcli.runtime.draft_settings import NO_DRAFTING, DraftSettings
from llmcli.runtime.interrupt import allow_interrupts
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.ui import UI
from quant.model_file.read_header import read_header

TOKENS_PER_ANSWER = 2048  # context tokens per additional answer, if no context size was requested


class ModelSwitcher:
    """Opens models one after the other and keeps the current one open.

    The command-line options apply to every model, except `--quant` and `--chat-template`, which
    apply only to the first.

    - `is_chat`: answers follow one another, so that sequences for branches are reserved.
    - `parallel`: the number of answers at once.
    - `must_generate`: False also accepts models made for embeddings.
    - `on_other_thread`: the model is opened and used on a separate thread.
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
            # checked now, because otherwise every request to a server would report the error
            ChatTemplate(self._template).check()
        self._held = ExitStack()

    def list_names(self) -> list[str]:
        """Return the catalog's names and the models on this disk.

        Empty if the user's catalog is invalid.
        """
        try:
            known = [
                *catalog.load_catalog(self.config),
                *(manifest.name for manifest in store.list_manifests(self.config)),
            ]
        except UserError:
            return []
        return sorted(set(known))

    def open(self, ref: str) -> OpenedModel:
        """Open the model that the command line names. Raises UserError."""
        slots = max(self.run_flags.samples, self.run_flags.search.beams, self.parallel)
        return self._open(self._held, ref, self.run_flags.quant, self._template, slots)

    def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
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
    ) -> OpenedModel:
        with allow_interrupts():  # an interrupted download or quantization resumes the next time
            model = prepare_model(ref, quant, self.config, self.ui)
        plan = check_memory(self._plan(model, slots), self.run_flags.fit, self.ui.note)
        options = resolve_options.resolve_flash_attention(
            plan.header, plan.options, plan.gpu_layers, self.config, plan.slots, self.parallel
        )
        opening = open_runner(
            model.path,
            options,
            template=template,
            raw=self.run_flags.raw,
            slots=plan.slots,
            gpu_layers=plan.gpu_layers,
            native_sampling=self.config.native_sampling,
            drafting=plan.drafting,
            needs_text=self.must_generate,
        )
        runner = (
            open_on_compute_thread(partial(stack.enter_context, opening))
            if self.on_other_thread
            else stack.enter_context(opening)
        )
        self._print_notes(plan, runner)
        file_bytes = sum(file.stat().st_size for file in runner.header.files)
        return OpenedModel(model.name, runner, file_bytes, model.system, model.settings)

    def _plan(self, model: FetchedModel, slots: int) -> RunPlan:
        """Plan the run of a model for `slots` answers at once, with resolved options."""
        flags = self.run_flags
        header = read_header(model.path)
        requested = flags.options
        if not flags.no_profile:
            requested = tuned_profile.apply_profile(
                header, requested, flags.typed, self.config, self.ui.warn
            )
            if requested.profile:
                self.ui.note(f"using profile {requested.profile}; --no-profile ignores it")
        options, gpu_layers = resolve_options.resolve_options(
            header, requested, self.ui.warn, slots, tokens_per_answer(flags, self.parallel)
        )
        if self.parallel > 1:
            options = replace(options, scoring_outputs=resolve_options.scoring_outputs(header))
        return RunPlan(
            model.name,
            header,
            options,
            gpu_layers,
            self._drafting(),
            self._n_sequences(slots, resolve_options.spare_sequences(header, options)),
            required_slots=slots,
            is_ctx_requested=flags.options.ctx_size is not None,
        )

    def _n_sequences(self, slots: int, branches: int) -> int:
        return with_branches(slots, branches, self.parallel) if self.is_chat else slots

    def _print_notes(self, plan: RunPlan, runner: Runner) -> None:
        if plan.options.reproducible:
            self.ui.note(reproducible.GUARANTEE)
        if plan.drafting.is_requested and runner.engine.resources.speculation is None:
            self.ui.note(
                "speculative decoding is off: on this machine a pass over several tokens costs as "
                "much as separate passes"
            )
        if runner.template is None and runner.can_generate and not self.run_flags.raw:
            self.ui.note(
                f"{plan.name} is a base model without a chat template: it continues the text"
            )

    def _drafting(self) -> DraftSettings:
        """Return the draft settings; no drafting if several answers are generated at once."""
        flags = self.run_flags
        if flags.samples > 1 or flags.search.beams > 1:
            return NO_DRAFTING
        if flags.model_draft is None:
            return DraftSettings(flags.ngram_draft)
        with allow_interrupts():
            model = prepare_model(flags.model_draft, None, self.config, self.ui)
        return DraftSettings(flags.ngram_draft, model.path)


def tokens_per_answer(run_flags: RunFlags, parallel: int) -> int | None:
    """Return the context tokens that each of several answers needs; None for a single answer."""
    limit = None if run_flags.predict in (None, -1) else run_flags.predict
    if parallel > 1:
        return limit or TOKENS_PER_ANSWER
    return limit if run_flags.samples > 1 else None


def with_branches(slots: int, branches: int, parallel: int) -> int:
    """Return the number of sequences for `slots` answers and the `branches` of a chat.

    With several answers at once, each branch (a cached prefix) needs a sequence besides those of
    the answers.
    """
    if parallel > 1 and branches > 1:
        return min(MAX_SEQUENCES, slots + branches)
    return max(slots, branches)
