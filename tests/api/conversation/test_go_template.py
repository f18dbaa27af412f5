"""ollama's field `template`: a part of Go's template language."""

import pytest

from llmcli.api.conversation.go_template import MAX_CHARACTERS, render
from llmcli.api.errors import ApiError

VARIABLES = {"System": "", "Prompt": "hi", "Response": ""}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("no action", "no action"),
        ("<{{ .Prompt }}>", "<hi>"),
        ("<{{.Prompt}}>{{ .Response }}", "<hi>"),
        ("a {{- .Prompt }} b", "ahi b"),
        ("a {{ .Prompt -}} b", "a hib"),
        ("a \n{{- .Prompt -}}\n b", "ahib"),
        ("{{ if .System }}S{{ else if .Prompt }}P{{ else }}E{{ end }}", "P"),
        ("{{ if .Prompt }}{{ if .System }}S{{ else }}N{{ end }}{{ end }}", "N"),
        ("{{/* a comment */}}x", "x"),
        ("x {{ .Prompt", "x {{ .Prompt"),
    ],
)
def test_texts_variables_and_conditions(source: str, text: str) -> None:
    assert render(source, VARIABLES) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ .Messages }}", "it uses .Messages"),
        ("{{ range .Messages }}", "only variables, if, else and end"),
        ("{{-.Prompt}}", "only variables, if, else and end"),
        ("{{ if .Prompt }}", "an if has no end"),
        ("{{ end }}", "an else or end has no if"),
        ("{{ if .Prompt }}" * 51, "nested too deeply"),
        ("x" * (MAX_CHARACTERS + 1), "more than 65,536 characters"),
    ],
)
def test_anything_else_is_refused(source: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        render(source, VARIABLES)
    assert caught.value.param == "template"


@pytest.mark.parametrize("source", ["{{" + " " * 60_000, "{{" * 30_000, "{{ " * 20_000])
def test_a_long_template_without_an_action_is_read_at_once(source: str) -> None:
    """A pattern that tries every division of the spaces would take hours."""
    assert render(source, VARIABLES) == source
