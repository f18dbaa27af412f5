"""Adding and removing aliases in the user's models.toml."""

import tomllib
from pathlib import Path

import pytest

from llmcli.catalog import aliases, catalog
from llmcli.catalog.fetch import resolve_ref
from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.runtime.sampling import default_sampling

USER_CATALOG = """# my models
[models.first]   # the first
alias = "smollm2:135m"
system = '''
[models."tiny"]
not a table
'''

# about tiny
[models."tiny"]
alias = "smollm2:135m"

[models."tiny".settings]
temp = 0.1

# about the last
[models.last]
alias = "gemma3:270m"
"""


def write_user_catalog(text: str) -> Path:
    """Write the user's models.toml and return its path."""
    path = load_config().user_catalog
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_an_alias_is_written_and_read_back():
    system = 'Say "hi"\n\tand\\ nothing \x7f else \u00e9'
    assert (
        aliases.write_alias(
            load_config(), "tiny:x", "smollm2:135m", system, {"temp": 0.25, "top_k": 5}, force=False
        )
        is False
    )
    entry = catalog.load_catalog(load_config())["tiny:x"]
    assert (entry.alias, entry.system, entry.settings) == (
        "smollm2:135m",
        system,
        {"temp": 0.25, "top_k": 5},
    )


def test_replacing_an_alias_leaves_the_rest_of_the_file_unchanged():
    path = write_user_catalog(USER_CATALOG)
    aliases.write_alias(load_config(), "tiny", "gemma3:270m", "new", {}, force=True)
    text = path.read_text()
    assert text.startswith(USER_CATALOG[: USER_CATALOG.index('[models."tiny"]\nalias')])
    assert text.endswith('# about the last\n[models.last]\nalias = "gemma3:270m"\n')
    assert tomllib.loads(text)["models"]["tiny"] == {"alias": "gemma3:270m", "system": "new"}


def test_deleting_an_alias_leaves_the_other_tables():
    path = write_user_catalog(USER_CATALOG)
    aliases.delete_alias(load_config(), "tiny")
    assert sorted(tomllib.loads(path.read_text())["models"]) == ["first", "last"]
    assert "# about the last" in path.read_text()


@pytest.mark.parametrize("name", ["first", "tiny", "last"])
def test_deleting_an_alias_leaves_the_comments_outside_of_its_table(name):
    path = write_user_catalog(USER_CATALOG + "# the end\n")
    aliases.delete_alias(load_config(), name)
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comments == ["# my models", "# about tiny", "# about the last", "# the end"]


def test_all_tables_of_an_alias_are_replaced():
    path = write_user_catalog(
        '[models.tiny]\nalias = "smollm2:135m"\n\n# about a\n[models.a]\nalias = "gemma3:270m"\n\n'
        "# about settings\n[models.tiny.settings]\ntemp = 0.1\n\n"
        '# about the last\n[models.last] # last\nalias = "gemma3:270m" # value\n'
    )
    aliases.write_alias(load_config(), "tiny", "gemma3:270m", None, {}, force=True)
    assert path.read_text() == (
        '[models.tiny]\nalias = "gemma3:270m"\n\n# about a\n[models.a]\nalias = "gemma3:270m"\n\n'
        '# about settings\n\n# about the last\n[models.last] # last\nalias = "gemma3:270m" # value\n'
    )


def test_a_file_that_tomlkit_cannot_read_is_not_edited():
    text = (
        '[models.tiny.settings]\ntemp = 0.1\n\n[models.tiny]\nalias = "gemma3:270m"\n'
        '[models]\n[models.a]\nalias = "gemma3:270m"\n[models.tiny.limits]\nq = 1\n'
    )
    path = write_user_catalog(text)
    with pytest.raises(UserError, match="cannot safely edit tiny"):
        aliases.delete_alias(load_config(), "tiny")
    assert path.read_text() == text


def test_deleting_the_last_alias_leaves_a_valid_file():
    aliases.write_alias(load_config(), "a", "smollm2:135m", None, {"temp": 0.5}, force=False)
    aliases.delete_alias(load_config(), "a")
    assert "a" not in catalog.load_catalog(load_config())
    aliases.write_alias(load_config(), "b", "smollm2:135m", None, {}, force=False)
    assert catalog.load_catalog(load_config())["b"].alias == "smollm2:135m"


def test_an_existing_name_is_replaced_only_with_force():
    with pytest.raises(UserError, match=r"smollm2:135m is already a model of .*models\.toml"):
        aliases.write_alias(load_config(), "smollm2:135m", "gemma3:270m", None, {}, force=False)
    aliases.write_alias(load_config(), "mine", "gemma3:270m", None, {}, force=False)
    with pytest.raises(UserError, match="mine is already one of your aliases"):
        aliases.write_alias(load_config(), "mine", "smollm2:135m", None, {}, force=False)
    assert aliases.write_alias(load_config(), "mine", "smollm2:135m", None, {}, force=True) is True


def test_an_unknown_target_or_an_invalid_name_raises_an_error():
    with pytest.raises(UserError, match="no model called 'nothing'"):
        aliases.write_alias(load_config(), "mine", "nothing", None, {}, force=False)
    with pytest.raises(UserError, match="is not a valid name"):
        aliases.write_alias(load_config(), "my model", "smollm2:135m", None, {}, force=False)
    with pytest.raises(UserError, match="no model called 'self'"):
        aliases.write_alias(load_config(), "self", "self", None, {}, force=False)


@pytest.mark.parametrize(
    "text", ['models.tiny = {alias = "smollm2:135m"}\n', '[models]\ntiny.alias = "smollm2:135m"\n']
)
def test_a_file_that_cannot_be_edited_safely_is_not_changed(text):
    path = write_user_catalog(text)
    with pytest.raises(UserError, match="cannot safely edit"):
        aliases.write_alias(load_config(), "tiny", "gemma3:270m", None, {}, force=True)
    assert path.read_text() == text


def test_an_alias_is_appended_to_a_file_without_a_final_newline():
    path = write_user_catalog('[models.a]\nalias = "smollm2:135m"')
    aliases.write_alias(load_config(), "b", "a", None, {}, force=False)
    assert list(tomllib.loads(path.read_text())["models"]) == ["a", "b"]


def test_an_alias_of_a_file_stores_the_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    aliases.write_alias(load_config(), "mine", "./m.gguf", None, {}, force=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_ref("mine", load_config()).ref.name == str(tmp_path / "m.gguf")


def test_a_system_text_that_is_not_utf8_raises_an_error_and_writes_nothing():
    with pytest.raises(UserError, match="not UTF-8"):
        aliases.write_alias(load_config(), "mine", "smollm2:135m", "a\udcff", {}, force=False)
    assert not load_config().user_catalog.exists()


def test_logit_biases_are_stored_with_an_alias():
    values = default_sampling().with_values({"logit_bias": "15043+1,2-inf"}).as_dict()
    aliases.write_alias(
        load_config(),
        "mine",
        "smollm2:135m",
        None,
        {"logit_bias": values["logit_bias"]},
        force=False,
    )
    settings = catalog.load_catalog(load_config())["mine"].settings
    assert default_sampling().with_values(settings).as_dict() == values
