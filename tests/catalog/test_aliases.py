import tomllib
from pathlib import Path

import pytest

from llmcli.catalog import aliases, catalog
from llmcli.catalog.fetch import resolve_ref
from llmcli.config import load_config
from llmcli.errors import UserError
from llmcli.runtime.sampling import default_sampling

WRITTEN = """# my models
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


def user(text: str) -> Path:
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


def test_everything_else_in_the_file_stays_as_it_was():
    path = user(WRITTEN)
    aliases.write_alias(load_config(), "tiny", "gemma3:270m", "new", {}, force=True)
    text = path.read_text()
    assert text.startswith(WRITTEN[: WRITTEN.index('[models."tiny"]\nalias')])
    assert text.endswith('# about the last\n[models.last]\nalias = "gemma3:270m"\n')
    assert tomllib.loads(text)["models"]["tiny"] == {"alias": "gemma3:270m", "system": "new"}


def test_deleting_takes_only_its_own_table():
    path = user(WRITTEN)
    aliases.delete_alias(load_config(), "tiny")
    assert sorted(tomllib.loads(path.read_text())["models"]) == ["first", "last"]
    assert "# about the last" in path.read_text()


@pytest.mark.parametrize("name", ["first", "tiny", "last"])
def test_comments_outside_of_the_table_stay(name):
    path = user(WRITTEN + "# the end\n")
    aliases.delete_alias(load_config(), name)
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comments == ["# my models", "# about tiny", "# about the last", "# the end"]


def test_tables_of_a_name_may_be_apart():
    path = user(
        '[models.tiny]\nalias = "smollm2:135m"\n\n# about a\n[models.a]\nalias = "gemma3:270m"\n\n'
        "# about settings\n[models.tiny.settings]\ntemp = 0.1\n\n"
        '# about the last\n[models.last] # last\nalias = "gemma3:270m" # value\n'
    )
    aliases.write_alias(load_config(), "tiny", "gemma3:270m", None, {}, force=True)
    assert path.read_text() == (
        '[models.tiny]\nalias = "gemma3:270m"\n\n# about a\n[models.a]\nalias = "gemma3:270m"\n\n'
        '# about settings\n\n# about the last\n[models.last] # last\nalias = "gemma3:270m" # value\n'
    )


def test_a_file_that_tomlkit_cannot_read_is_refused():
    text = (
        '[models.tiny.settings]\ntemp = 0.1\n\n[models.tiny]\nalias = "gemma3:270m"\n'
        '[models]\n[models.a]\nalias = "gemma3:270m"\n[models.tiny.limits]\nq = 1\n'
    )
    path = user(text)
    with pytest.raises(UserError, match="cannot safely edit tiny"):
        aliases.delete_alias(load_config(), "tiny")
    assert path.read_text() == text


def test_the_last_alias_leaves_a_file_that_reads():
    aliases.write_alias(load_config(), "a", "smollm2:135m", None, {"temp": 0.5}, force=False)
    aliases.delete_alias(load_config(), "a")
    assert "a" not in catalog.load_catalog(load_config())
    aliases.write_alias(load_config(), "b", "smollm2:135m", None, {}, force=False)
    assert catalog.load_catalog(load_config())["b"].alias == "smollm2:135m"


def test_a_name_that_is_taken_is_not_shadowed_in_silence():
    with pytest.raises(UserError, match=r"smollm2:135m is already a model of .*models\.toml"):
        aliases.write_alias(load_config(), "smollm2:135m", "gemma3:270m", None, {}, force=False)
    aliases.write_alias(load_config(), "mine", "gemma3:270m", None, {}, force=False)
    with pytest.raises(UserError, match="mine is already one of your aliases"):
        aliases.write_alias(load_config(), "mine", "smollm2:135m", None, {}, force=False)
    assert aliases.write_alias(load_config(), "mine", "smollm2:135m", None, {}, force=True) is True


def test_an_unknown_target_and_a_strange_name_are_told():
    with pytest.raises(UserError, match="no model called 'nothing'"):
        aliases.write_alias(load_config(), "mine", "nothing", None, {}, force=False)
    with pytest.raises(UserError, match="is not a valid name"):
        aliases.write_alias(load_config(), "my model", "smollm2:135m", None, {}, force=False)
    with pytest.raises(UserError, match="no model called 'self'"):
        aliases.write_alias(load_config(), "self", "self", None, {}, force=False)


@pytest.mark.parametrize(
    "text", ['models.tiny = {alias = "smollm2:135m"}\n', '[models]\ntiny.alias = "smollm2:135m"\n']
)
def test_a_file_that_cannot_be_edited_safely_is_left_alone(text):
    path = user(text)
    with pytest.raises(UserError, match="cannot safely edit"):
        aliases.write_alias(load_config(), "tiny", "gemma3:270m", None, {}, force=True)
    assert path.read_text() == text


def test_a_file_without_a_last_newline_is_continued():
    path = user('[models.a]\nalias = "smollm2:135m"')
    aliases.write_alias(load_config(), "b", "a", None, {}, force=False)
    assert list(tomllib.loads(path.read_text())["models"]) == ["a", "b"]


def test_an_alias_of_a_file_means_the_same_in_every_folder(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    aliases.write_alias(load_config(), "mine", "./m.gguf", None, {}, force=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_ref("mine", load_config()).ref.name == str(tmp_path / "m.gguf")


def test_a_system_text_that_is_not_utf8_is_refused_and_nothing_is_written():
    with pytest.raises(UserError, match="not UTF-8"):
        aliases.write_alias(load_config(), "mine", "smollm2:135m", "a\udcff", {}, force=False)
    assert not load_config().user_catalog.exists()


def test_biases_of_tokens_are_kept_with_a_name():
    values = default_sampling().with_values({"logit_bias": "15043+1,2-inf"}).as_dict()
    aliases.write_alias(
        load_config(),
        "mine",
        "smollm2:135m",
        None,
        {"logit_bias": values["logit_bias"]},
        force=False,
    )
    kept = catalog.load_catalog(load_config())["mine"].settings
    assert default_sampling().with_values(kept).as_dict() == values
