"""Open the model that a REF names: download and quantize it if needed, plan its memory, load it.
`chat`, `run`, `serve` and `batch` do this at their start, and the chat command `/model` does it
again.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmcli.catalog import catalog, store
from llmcli.catalog.fetch import FetchedModel
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader.draft_file import prepare_draft_file
from llmcli.model_loader.earlier_load import EarlierLoad
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.rehearsal.rehearse import rehearse_model
from llmcli.model_loader.run_flags import RunFlags
from llmcli.model_loader.template_option import read_template_option
from llmcli.planning import resolve_options
from llmcli.planning.admission import check_memory, explain_failed_load
from llmcli.planning.dry_runs.run_plan import RunPlan
from llmcli.planning.measurements import tuned_profile
from llmcli.planning.prediction import key_precision
from llmcli.planning.state_budget import state_budget
from llmcli.runtime import reproducible
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES
from llmcli.runtime.binding.model import AllocationError
from llmcli.runtime.compute_thread import open_on_compute_thread
from llmcli.runtime.draft_settings import (
    NO_DRAFTING,
    DraftSettings,
    choose_drafting,
    require_prediction_layers,
)
from llmcli.runtime.interrupt import allow_interrupts
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.ui import UI
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header

if TYPE_CHECKING:
    from llmcli.model_loader.planned_memory import PlannedMemory

# tokens that each additional answer adds to the context, if the user sets neither its size nor -n
TOKENS_PER_ANSWER = 2048


class ModelSwitcher:
    """Opens the first model of a command, and later replaces it by others. The options of the
    command line apply to every model, except `--quant` and `--chat-template`, which apply only to
    the first.
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
        max_default_ctx: int = resolve_options.DEFAULT_MAX_CTX,
        earlier: EarlierLoad | None = None,
    ) -> None:
        """`is_chat`: whether the answers are those of a conversation; the context then also gets
        sequences that cache its branches. `parallel`: number of answers at once. `must_generate`:
        False also accepts models that only compute embeddings. `on_other_thread`: open models on
        their own thread, because another thread will use them. `max_default_ctx`: the largest
        context in tokens if the user has set no size. `earlier`: what an earlier load or
        `predict_memory` has found for the model, which has the memory for it.

        Raises UserError for invalid options, and if an RPC worker cannot be used.
        """
        resolve_options.validate_options(run_flags.options)
        options = run_flags.options.with_placement(run_flags.placement.join(ui))
        run_flags = replace(run_flags, options=options)
        config = replace(config, trust_files=config.trust_files or run_flags.trust)
        self.run_flags, self.config, self.ui = run_flags, config, ui
        self.is_chat, self.parallel, self.must_generate, self.on_other_thread = (
            is_chat,
            parallel,
            must_generate,
            on_other_thread,
        )
        self._max_default_ctx, self._earlier = max_default_ctx, earlier
        self._template = (
            read_template_option(run_flags.chat_template) if run_flags.chat_template else None
        )
        if self._template is not None:
            # checked now, because otherwise every request to a server would fail
            ChatTemplate(self._template).check()
        self._open_models = ExitStack()

    def list_names(self) -> list[str]:
        """Return the names of the models in the catalog and on this disk, for completion. Empty if
        the user's catalog is invalid.
        """
        try:
            names = [
                *catalog.load_catalog(self.config),
                *(manifest.name for manifest in store.list_manifests(self.config)),
            ]
        except UserError:
            return []
        return sorted(set(names))

    def open(self, ref: str) -> OpenedModel:
        """Open the first model, `ref`, with all options of the command line. Raises UserError."""
        slots = max(self.run_flags.samples, self.run_flags.search.beams, self.parallel)
        with self.ui.status(f"loading {ref} …"):
            return self._open(self._open_models, ref, self.run_flags.quant, self._template, slots)

    def predict_memory(self, ref: str) -> "PlannedMemory":
        """Return the memory that the first model, `ref`, will take, without loading its weights.
        Raises UserError if no setting of it fits.
        """
        from llmcli.model_loader.planned_memory import predict_run  # the import is slow

        slots = max(self.run_flags.samples, self.run_flags.search.beams, self.parallel)
        model, plan, _ = self._accept_plan(ref, self.run_flags.quant, self._template, slots)
        return predict_run(model, self._resolve_flash(plan))

    def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
        """Open the model `ref`, pass it to `use`, and then close the previous model. After an error
        the new model is closed, and the previous one stays open. `beams`: number of sequences that
        a beam search needs.

        Both models are open for a moment, so both KV caches must fit into memory. Their weights
        need not, because they are memory-mapped.
        """
        new_models = ExitStack()
        try:
            with self.ui.status(f"loading {ref} …"):
                model = self._open(new_models, ref, None, None, max(self.run_flags.samples, beams))
            use(model)
        except BaseException:
            new_models.close()
            raise
        old_models, self._open_models = self._open_models, new_models
        old_models.close()

    def close(self) -> None:
        """Free the open model."""
        self._open_models.close()

    def _open(
        self, stack: ExitStack, ref: str, quant: str | None, template: str | None, slots: int
    ) -> OpenedModel:
        """Prepare, plan and load the model `ref`. It is freed when `stack` is closed. `quant` and
        `template`: the values of --quant and --chat-template. `slots`: number of answers at once.
        Raises UserError.
        """
        model, plan, was_rehearsed = self._accept_plan(ref, quant, template, slots)
        options = replace(
            self._resolve_flash(plan).options, gpu_layers=format_layers(plan.placement.gpu_layers)
        )
        opening = open_runner(
            model.path,
            options,
            template=template,
            raw=self.run_flags.raw,
            slots=plan.slots,
            placement=plan.placement,
            native_sampling=self.config.native_sampling,
            drafting=plan.drafting,
            needs_text=self.must_generate,
            measured_passes=self._earlier.passes if self._earlier else None,
            was_rehearsed=was_rehearsed,
        )
        try:
            runner = (
                open_on_compute_thread(partial(stack.enter_context, opening))
                if self.on_other_thread
                else stack.enter_context(opening)
            )
        except AllocationError as error:
            raise explain_failed_load(plan, error) from None
        runner.engine.schedule = replace(
            runner.engine.schedule,
            host_bytes=state_budget(runner.mapped_bytes),
            measure_host_bytes=partial(state_budget, runner.mapped_bytes),
        )
        if self.is_chat and self.parallel == 1:
            runner.model.keep_parts()
        self._print_notes(plan, runner)
        file_bytes = sum(file.stat().st_size for file in runner.header.files)
        return OpenedModel(
            model.name, runner, file_bytes, model.system, model.settings, model.sha256
        )

    def _accept_plan(
        self, ref: str, quant: str | None, template: str | None, slots: int
    ) -> tuple[FetchedModel, RunPlan, bool]:
        """Prepare the model `ref`. Return it with a plan of its run that fits into memory, and
        whether its file was rehearsed. The parameters are those of `_open`. Raises UserError.
        """
        with allow_interrupts():  # an interrupted download or quantization resumes the next time
            model = prepare_model(ref, quant, self.config, self.ui)
        header = read_header(model.path)
        # first, because the rehearsal of a new file may take long
        require_prediction_layers(self.run_flags.draft, header)
        was_rehearsed = rehearse_model(
            header,
            self.config,
            self.ui,
            uses_template=template is None and not self.run_flags.raw,
        )
        plan = self._plan(model, header, slots)
        if self._earlier and self._earlier.surely_fits():
            return model, plan, was_rehearsed
        return model, check_memory(plan, self.run_flags.fit, self.ui.note), was_rehearsed

    def _resolve_flash(self, plan: RunPlan) -> RunPlan:
        """Return an accepted plan with flash attention switched on or off."""
        options = resolve_options.resolve_flash_attention(
            plan.header, plan.options, plan.placement, self.config, plan.slots, self.parallel
        )
        return replace(plan, options=options)

    def _plan(self, model: FetchedModel, header: ModelHeader, slots: int) -> RunPlan:
        """Return the plan of a run of the model for `slots` answers at once. The options are those
        of the command line, of the model's profile, and defaults for this machine.
        """
        flags = self.run_flags
        requested = flags.options
        if not flags.no_profile:
            requested = tuned_profile.apply_profile(
                header, requested, flags.typed, self.config, self.ui.warn
            )
            if requested.profile:
                self.ui.note(f"using profile {requested.profile}; --no-profile ignores it")
        if requested.ctx_size is None and self._earlier:
            # a default is chosen by an estimate, which may exceed the memory of an exact plan
            requested = replace(requested, ctx_size=self._earlier.memory.n_ctx)
        options, placement = resolve_options.resolve_options(
            header,
            requested,
            self.ui.warn,
            slots,
            tokens_per_answer(flags, self.parallel),
            self.ui.note,
            max_default=self._max_default_ctx,
            config=self.config,
        )
        if self.parallel > 1:
            options = replace(options, scoring_outputs=resolve_options.scoring_outputs(header))
        return RunPlan(
            model.name,
            header,
            options,
            placement,
            self._draft_settings(model, header),
            self._n_sequences(slots, resolve_options.spare_sequences(header, options)),
            required_slots=slots,
            is_ctx_requested=flags.options.ctx_size is not None,
        )

    def _n_sequences(self, slots: int, branches: int) -> int:
        """Return the number of sequences of the context, with `branches` for a chat."""
        return with_branches(slots, branches, self.parallel) if self.is_chat else slots

    def _print_notes(self, plan: RunPlan, runner: Runner) -> None:
        """Print what the user should know about the loaded model, for example that it is a base
        model.
        """
        if loss := key_precision.describe_key_loss(plan.header, plan.options.cache_type_k):
            self.ui.warn(loss)
        if plan.options.reproducible:
            self.ui.note(reproducible.GUARANTEE)
            if reproducible.computes_single_tokens(runner.header):
                self.ui.note(reproducible.TOKEN_BY_TOKEN)
        if runner.draft_obstacle:
            self.ui.note(f"speculative decoding is off: {runner.draft_obstacle}")
        if runner.template is None and runner.can_generate and not self.run_flags.raw:
            self.ui.note(
                f"{plan.name} is a base model without a chat template: it continues the text"
            )

    def _draft_settings(self, model: FetchedModel, header: ModelHeader) -> DraftSettings:
        """Return the settings of speculative decoding, after preparing the draft file if there is
        one. Samples and beams are generated without drafts. Raises like `prepare_draft_file`.
        """
        flags = self.run_flags
        if flags.samples > 1 or flags.search.beams > 1:
            return NO_DRAFTING
        has_file = flags.model_draft is not None
        settings = choose_drafting(flags.draft, flags.ngram_draft, has_file=has_file)
        if flags.model_draft is None:
            return settings
        return prepare_draft_file(flags.model_draft, settings, model, header, self.config, self.ui)


def format_layers(count: int) -> str:
    """Return a number of layers on the GPU, negative for all, as the option -ngl takes it."""
    return "all" if count < 0 else str(count)


def tokens_per_answer(run_flags: RunFlags, parallel: int) -> int | None:
    """Return how many context tokens each of several answers at once needs. Return None for a
    single answer, and for samples without a limit of tokens.
    """
    limit = None if run_flags.predict in (None, -1) else run_flags.predict
    if parallel > 1:
        return limit or TOKENS_PER_ANSWER
    return limit if run_flags.samples > 1 else None


def with_branches(slots: int, branches: int, parallel: int) -> int:
    """Return the number of sequences that a context needs for `slots` answers and for `branches`
    cached prefixes.

    With several answers at once (`parallel`), the prefixes need sequences besides those of the
    answers. Otherwise a prefix may be in the sequence of the answer.
    """
    if parallel > 1 and branches > 1:
        return min(MAX_SEQUENCES, slots + branches)
    return max(slots, branches)
