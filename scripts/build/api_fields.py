#!/usr/bin/env python3
"""Write docs/api-fields.md, the list of all fields of requests to a server.

usage: .venv/bin/python scripts/build/api_fields.py [--check]

The page is built from the models of request bodies, which also check the requests. The fields of
the APIs' own references are in tests/data/api_references/, and a test compares both. With --check
nothing is written, and the exit code is 1 if the page is out of date.
"""

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmcli.api.bodies.base import RequestBody
from llmcli.api.bodies.generation_fields import GenerationBody
from llmcli.api.bodies.reference import FieldRow, field_rows, inner_bodies, own_rows
from llmcli.api.forms import FORMS
from llmcli.serve.http.routes import ROUTES
from llmcli.serve.processes.models.model_reports import MODEL_FIELDS
from llmcli.serve.processes.models.model_routes import MODEL_ROUTES
from scripts.build.generated_page import ROOT, update_page

PAGE = ROOT / "docs" / "api-fields.md"
REFERENCES = ROOT / "tests" / "data" / "api_references"
HEAD = """\
# API fields

This page is for people who look up a field of a request to `llmcli serve`.

`scripts/build/api_fields.py` writes it from the models that check the requests, and a test keeps it current.
A running server has the same list at `/docs`, and in OpenAPI's format at `/openapi.json`.

## Read the tables

- A field without another word is honored.
- *No effect*: the field is accepted and would not change the answer.
- *No effect, and a note says so*: a client may expect an effect, so the answer's `notes` name the field.
- *Refused*: the field would change the answer and is not supported. The error names it, and what to do instead. Values that ask for nothing (null, false, -1, an empty text, list or object) are accepted.

Null counts as a missing field everywhere.
A field that is in no table is accepted with a note, unless its name looks like a misspelling of another one; then the error names that one.
"""
SHARED_HEAD = """\
## Fields of all generating APIs

All paths that generate text have these fields, whatever their API, unless their own table says otherwise.
"""
OBJECTS_HEAD = """\
## Objects in requests

The fields of messages and tools that are not in these tables are accepted without a note, because clients send back what they received.
"""
MODELS_HEAD = """\
## Answers of `/v1/models`

A server of several models has these fields for each, beside OpenAI's. `memory` of the answer has `limit_bytes` and `reserved_bytes` of the host, and under `devices` those of each GPU.
"""
REFERENCES_HEAD = """\
## References

A test compares the tables with these lists of fields.
"""
COLUMNS = "field", "values", "of", "what the server does with it"


def build_page() -> str:
    """Return the text of docs/api-fields.md."""
    parts = [HEAD, SHARED_HEAD, field_table(field_rows(GenerationBody))]
    routes = (*ROUTES.values(), *MODEL_ROUTES)
    bodies = {route.path: route.body_type for route in routes if route.body_type}
    shown: set[type[RequestBody]] = set()
    for path, body_type in sorted(bodies.items(), key=lambda entry: (entry[0] not in FORMS, entry)):
        if body_type not in shown:
            shown.add(body_type)
            parts += path_section(path, body_type, bodies)
    outer: list[type[RequestBody]] = [GenerationBody, *shown]
    objects = {inner.__name__: inner for body in outer for inner in inner_bodies(body)}
    parts.append(OBJECTS_HEAD)
    for name, inner in sorted(objects.items()):
        shared = (GenerationBody,) if issubclass(inner, GenerationBody) else ()
        words = "It also has the fields of all generating APIs.\n" if shared else ""
        parts += [
            f"### {name}\n",
            f"{sentence(inner)}\n{words}",
            field_table(own_rows(inner, shared)),
        ]
    fields = [(f"`{name}`", text) for name, text in MODEL_FIELDS.items()]
    parts += [MODELS_HEAD, table(("field", "value"), fields)]
    parts += [REFERENCES_HEAD, reference_table()]
    return "\n".join(parts)


def path_section(
    path: str, body_type: type[RequestBody], bodies: dict[str, type[RequestBody]]
) -> Iterator[str]:
    """Yield the parts of the section about a path, and about others with the same body."""
    others = sorted(name for name, other in bodies.items() if other is body_type and name != path)
    yield f"## `{path}`\n"
    words = sentence(body_type)
    if others:
        words += f" The body is also that of {', '.join(f'`{name}`' for name in others)}."
    yield f"{words}\n"
    shared = (GenerationBody,) if issubclass(body_type, GenerationBody) else ()
    yield field_table(own_rows(body_type, shared))


def sentence(body_type: type[RequestBody]) -> str:
    """Return what a body is, from its docstring."""
    return " ".join((inspect.getdoc(body_type) or "").split())


def field_table(rows: Iterable[FieldRow]) -> str:
    """Return the table of fields in Markdown."""
    return table(
        COLUMNS, [(f"`{row.name}`", row.values, row.origin, row.description) for row in rows]
    )


def reference_table() -> str:
    """Return the table of the references whose fields are in the page."""
    rows = []
    for file in sorted(REFERENCES.glob("*.json")):
        reference = json.loads(file.read_text(encoding="utf-8"))
        rows.append((reference["reference"], f"`{reference['path']}`", reference["source"]))
    return table(("reference", "path", "source"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(escape_cell, line))} |\n" for line in lines)


def escape_cell(text: str) -> str:
    """Return a text as it is written in a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    update_page(__doc__ or "", PAGE, build_page)
