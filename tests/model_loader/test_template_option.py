"""--chat-template takes a name, a file or Jinja text."""

from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.model_loader.template_option import read_template_option
from llmcli.runtime.text.named_templates import find_template


def test_a_name_a_file_and_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my.jinja"
    file.write_text("{{ messages[0].content }}")
    assert read_template_option("llama3") == find_template("llama3")
    assert read_template_option("my.jinja") == "{{ messages[0].content }}"
    assert read_template_option("{{ 1 }}") == "{{ 1 }}"
    for value in ("lama3", "This is not a chat template, it is"):
        with pytest.raises(UserError) as error:
            read_template_option(value)
        assert "chatml, command-r" in error.value.hint
    with pytest.raises(UserError) as error:
        read_template_option("missing.jinja")
    assert "a name" not in error.value.hint
