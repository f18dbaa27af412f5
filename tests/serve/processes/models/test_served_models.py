"""Which models a server of several offers, under which names, and which of them share a process."""

from pathlib import Path

import pytest

from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.model_loader.run_flags import RunFlags
from llmcli.runtime.requests.beam_settings import NO_SEARCH
from llmcli.runtime.requests.request import RunOptions
from llmcli.serve.processes.models.served_models import (
    ServedModel,
    find_served_models,
    match_name,
    prepared_refs,
)
from llmcli.serve.serve_request import ServeRequest
from llmcli.ui import UI
from quant.convert import checkpoint_source
from quant.quantize import plan, write


def find(catalog: str, *refs: str) -> dict[str, ServedModel]:
    """Return the models that a server of `refs` offers with this models.toml of the user."""
    config = load_config()
    config.user_catalog.parent.mkdir(parents=True, exist_ok=True)
    config.user_catalog.write_text(catalog)
    request = ServeRequest("", RunFlags(RunOptions(), {}, NO_SEARCH), config, UI(), 1, 1, {})
    return find_served_models(refs, request)


@pytest.fixture(scope="session")
def quantized(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as Q8_0. An alias of a file of floats would stand for a quantized file."""
    file = tmp_path_factory.mktemp("quantized") / "stories.gguf"
    source = checkpoint_source.open_checkpoint(stories)
    write.write_model(plan.plan_quantization(source, "Q8_0"), file, threads=1)
    return file


def test_an_alias_shares_the_process_of_its_model(quantized: Path) -> None:
    models = find(
        f'[serve."tiny"]\nref = "{quantized}"\n'
        f'[models."short"]\nalias = "{quantized}"\n'
        f'[models."shorter"]\nalias = "short"\n'
        f'[models."pirate"]\nalias = "{quantized}"\nsystem = "Talk like a pirate."\n'
        f'[models."cold"]\nalias = "{quantized}"\nsettings = {{temp = 0}}\n'
    )
    assert {name: set(model.names) for name, model in models.items()} == {
        "tiny": {"tiny", "short", "shorter"},
        "pirate": {"pirate"},
        "cold": {"cold"},
    }
    assert set(models["tiny"].request.settings["names"]) == {"tiny", "short", "shorter"}
    assert match_name("SHORTER:latest", models) == "tiny"


def test_an_alias_of_floats_is_another_file(stories_gguf: Path) -> None:
    models = find(
        f'[serve."tiny"]\nref = "{stories_gguf}"\n[models."short"]\nalias = "{stories_gguf}"\n'
    )
    assert [model.names for model in models.values()] == [("tiny",), ("short",)]


def test_tables_with_equal_settings_share_a_process(stories_gguf: Path) -> None:
    models = find(
        "".join(
            f'[serve."{name}"]\nref = "{stories_gguf}"\n{more}\n'
            for name, more in (
                ("a", "ctx_size = 512"),
                ("b", "ctx_size = 512\nsystem = 'x'"),
                ("c", "ctx_size = 512"),
                ("d", "ctx_size = 256"),
                ("e", "ctx_size = 512\npin = true"),
            )
        )
    )
    assert [model.names for model in models.values()] == [("a", "c"), ("b",), ("d",), ("e",)]


def test_refs_are_names_of_tables_models_or_files(stories_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(stories_gguf.read_bytes())
    catalog = f'[serve."tiny"]\nref = "{stories_gguf}"\nctx_size = 256\n'
    models = find(catalog, "tiny", str(copy), "no-such-model", "tiny")
    assert list(models) == ["tiny", "copy", "no-such-model"]
    assert models["tiny"].path == stories_gguf
    assert models["tiny"].request.run_flags.options.ctx_size == 256
    assert models["no-such-model"].path is None
    assert match_name(str(copy), models) == "copy"
    refs = prepared_refs(("tiny", str(copy), "other"), load_config())
    assert refs == [str(stories_gguf), str(copy), "other"]


def test_files_of_one_name_are_refused(stories_gguf: Path, tmp_path: Path) -> None:
    files = [tmp_path / folder / "model.gguf" for folder in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(stories_gguf.read_bytes())
    with pytest.raises(UserError, match=r"model is a name of both .*/one/.* and .*/two/") as error:
        find("", *map(str, files))
    assert "[serve." in (error.value.hint or "")
