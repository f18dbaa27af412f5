"""Prepare the file of `--model-draft`: a draft model, an EAGLE-3 draft or draft heads."""

from dataclasses import replace

from llmcli.catalog.fetch import FetchedModel
from llmcli.config import Config
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.rehearsal.rehearse import rehearse_file
from llmcli.runtime.draft_settings import DraftFile, DraftSettings, read_draft_file
from llmcli.runtime.drafting.draft_files.eagle3_match import EAGLE3
from llmcli.runtime.interrupt import allow_interrupts
from llmcli.ui import UI
from quant.model_file.model_header import ModelHeader


def prepare_draft_file(
    ref: str,
    settings: DraftSettings,
    model: FetchedModel,
    header: ModelHeader,
    config: Config,
    ui: UI,
) -> DraftSettings:
    """Return the settings with the draft file `ref`, which is downloaded and quantized if needed.
    `header`: that of the model's file.

    Raises UserError if the file cannot draft for `model`. Its hint is the draft model that the
    catalog names.
    """
    with allow_interrupts():
        file = prepare_model(ref, None, config, ui).path
    return use_draft_file(read_draft_file(file), settings, model, header, config, ui)


def use_draft_file(
    draft_file: DraftFile,
    settings: DraftSettings,
    model: FetchedModel,
    header: ModelHeader,
    config: Config,
    ui: UI,
) -> DraftSettings:
    """Return the settings with a draft file that is on this disk. Raises UserError as
    `prepare_draft_file` does.
    """
    path = draft_file.header.path
    suggestion = model.entry.draft if model.entry else ""
    settings = replace(settings, model=path).for_draft_file(
        header, suggestion, draft_file=draft_file
    )
    # an EAGLE-3 draft and heads compute nothing without the model
    if settings.model and settings.method != EAGLE3:
        rehearse_file(path, config, ui)
    return settings
