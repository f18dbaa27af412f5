"""Names without a tag: the catalog's default, or the smallest model, and which one is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.catalog import catalog, fetch
from llmcli.catalog.model_ref import default_entry, parse_ref
from llmcli.config import load_config
from llmcli.errors import UserError
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


def write_catalog(home: Path, *names: str, default: str = "") -> None:
    (home / "config").mkdir(exist_ok=True)
    (home / "config" / "models.toml").write_text(
        "".join(
            f'[models."{name}"]\n{"default = true" if name == default else ""}\n'
            f'[[models."{name}".sources]]\nkind = "hub"\nrepo = "o/{number}"\n'
            for number, name in enumerate(names)
        )
    )


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("smollm2", "smollm2:135m"),
        ("SmolLM2", "smollm2:135m"),
        ("qwen2.5-coder", "qwen2.5-coder:0.5b"),
        ("qwen2.5", "qwen2.5:0.5b"),
        ("mistral", "mistral:7b"),
        ("phi3", "phi3:mini"),
    ],
)
def test_a_name_without_a_tag_is_the_default_or_the_smallest_model(typed: str, name: str) -> None:
    resolved = fetch.resolve_ref(typed, load_config())
    assert resolved.ref.name == name
    assert resolved.note.startswith(
        f"{typed.lower() if typed != 'SmolLM2' else 'smollm2'} means {name}"
    )


def test_a_type_may_follow_a_name_without_a_tag() -> None:
    ref = fetch.resolve_ref("smollm2:q4_k", load_config()).ref
    assert (ref.name, ref.quant) == ("smollm2:135m", "Q4_K_M")


def test_a_marked_entry_is_the_default(home: Path) -> None:
    write_catalog(home, "big:70b", "big:8b", "big:900m", "big:8b-hf", "big:latest")
    config = load_config()
    assert default_entry("big", catalog.load_catalog(config)) == "big:900m"
    write_catalog(home, "big:70b", "big:8b", "big:900m", default="big:8b")
    assert default_entry("big", catalog.load_catalog(config)) == "big:8b"


def test_an_exact_name_and_a_path_go_before_a_tag(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalog(home, "mine", "mine:1b")
    assert fetch.resolve_ref("mine", load_config()).ref.name == "mine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert fetch.resolve_ref("smollm2", load_config()).ref.kind == "path"


def test_the_default_must_be_a_switch(home: Path) -> None:
    write_catalog(home, "a:1b")
    path = home / "config" / "models.toml"
    path.write_text(path.read_text().replace('"]\n', '"]\ndefault = "yes"\n', 1))
    with pytest.raises(UserError, match="`default` must be true or false"):
        catalog.load_catalog(load_config())


def test_commands_say_which_model_they_take(llmcli: Llmcli) -> None:
    note = "smollm2 means smollm2:135m here; also: smollm2:135m-hf, smollm2:360m, smollm2:1.7b"
    for words in (
        ["show", "smollm2"],
        ["plan", "smollm2", "-c", "512"],
        ["pull", "smollm2", "--offline"],
    ):
        assert llmcli(*words).err.split("\n").count(note) == 1, words


def test_an_alias_keeps_its_meaning(llmcli: Llmcli) -> None:
    assert "mine names smollm2:135m" in llmcli("alias", "mine", "smollm2").out
    assert catalog.load_catalog(load_config())["mine"].alias == "smollm2:135m"


def test_nothing_is_removed_without_its_complete_name(llmcli: Llmcli) -> None:
    done = llmcli("rm", "smollm2")
    assert (done.code, "smollm2:135m" in done.err) == (1, True)
    config = load_config()
    with pytest.raises(UserError):
        parse_ref("smollm2", catalog.load_catalog(config), config, accepts_bare_name=False)
