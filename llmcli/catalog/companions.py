"""Fetches the companions of a GGUF on the hub: files of its repository that llama.cpp loads in
addition to the model, such as a projector for images (mmproj) or prediction layers (mtp).

A companion is fetched only if the user names its kind. It is recorded in the model's manifest, so
that `rm` deletes it with the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmcli import file_lock
from llmcli.catalog import store
from llmcli.catalog.fetch import FetchedModel
from llmcli.catalog.hub.choose_files import HubFile, type_in_name
from llmcli.catalog.hub.download import download_files
from llmcli.catalog.hub.error_messages import explain_error
from llmcli.catalog.hub.listing import list_files
from llmcli.catalog.names.gguf_names import companion_kind
from llmcli.catalog.sources.hub import companion_kinds
from llmcli.catalog.spec import Spec
from llmcli.config import Config, disable_hub_telemetry
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay

# The type of a companion that is preferred if none has the type of the model, best first. They are
# small, and rounding a projector changes what the model sees.
PREFERRED_TYPES = ("F16", "BF16", "Q8_0", "F32")


def fetch_companions(
    model: FetchedModel, kinds: Sequence[str], config: Config, watcher: ProgressDisplay
) -> Mapping[str, Path]:
    """Return the path of the companion of each kind. Companions that are not on this disk are
    downloaded from the commit of the model.

    Raises UserError if the model is no GGUF of the hub, or if the repository has no such file.
    """
    with file_lock.hold_lock(store.lock_path(config, model.name), watcher, model.name):
        manifest = store.load_manifest(config, model.name)
        if manifest is None or model.kind != "gguf" or not model.source.startswith("hub:"):
            raise UserError(
                f"{model.name} is not a GGUF of the hub, so that it has no "
                f"{' or '.join(kinds)} there",
                hint="leave out --with",
            )
        companions = {
            kind: file for kind, file in manifest.companions.items() if Path(file.path).is_file()
        }
        if missing := [kind for kind in kinds if kind not in companions]:
            companions |= _download(model, missing, config, watcher)
            store.save_manifest(config, replace(manifest, companions=companions))
    return {kind: Path(companions[kind].path) for kind in kinds}


def _download(
    model: FetchedModel, kinds: Sequence[str], config: Config, watcher: ProgressDisplay
) -> dict[str, store.VerifiedFile]:
    """Download one companion of each kind. Raises UserError."""
    if config.offline:
        raise UserError(
            f"{' and '.join(kinds)} of {model.name} would be downloaded, and llmcli is offline",
            hint="leave out --offline (or unset HF_HUB_OFFLINE) and try again",
        )
    disable_hub_telemetry()
    spec = Spec("hub", repo=model.source.removeprefix("hub:"), revision=model.revision or "")
    with explain_error(spec, config):
        listing = list_files(spec, config, watcher)
        chosen = [
            choose_companion(kind, model.path.name, spec.repo, listing.files) for kind in kinds
        ]
        files = download_files(spec, listing.commit, tuple(chosen), config, watcher)
    return dict(zip(kinds, files, strict=True))


def choose_companion(kind: str, model_name: str, repo: str, files: Sequence[HubFile]) -> HubFile:
    """Return the file of the repository that is the companion of the model file `model_name`: of
    the same type as the model, or else of the first of PREFERRED_TYPES.

    Raises UserError if there is none.
    """
    candidates = [file for file in files if companion_kind(file.name) == kind]
    if not candidates:
        kinds = companion_kinds(files)
        raise UserError(
            f"{repo} has no {kind} file" + (f"; it has {', '.join(kinds)}" if kinds else ""),
            hint=f"use --with {kinds[0]}" if kinds else f"leave out --with {kind}",
        )
    types = ("" if kind == "mmproj" else type_in_name(model_name), *PREFERRED_TYPES)
    return min(candidates, key=lambda file: (_type_rank(file.name, types), file.name))


def _type_rank(name: str, types: Sequence[str]) -> int:
    """Return the position in `types` of the type in the name of a file; their number if it is not
    among them.
    """
    found = type_in_name(name)
    return types.index(found) if found in types else len(types)
