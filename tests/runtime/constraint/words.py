"""Compile grammars for the fake vocabulary, whose tokens are bytes."""

import json
from typing import Any

from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.constraint.compile import GrammarCompiler
from tests.fixtures.fakes import FakeModel


def refuse_native(constraint: Constraint) -> Grammar:
    raise AssertionError("llama.cpp's grammars need a real model")


GRAMMARS = GrammarCompiler(FakeModel(), refuse_native)


def schema(value: Any, jump: str = "lossless", is_strict: bool = False) -> Grammar:
    """Return the compiled grammar of a JSON schema, given as a value or as JSON text."""
    text = value if isinstance(value, str) else json.dumps(value)
    return GRAMMARS(Constraint("json_schema", text, jump=jump, is_strict=is_strict))


def gbnf(text: str, jump: str = "lossless") -> Grammar:
    """Return the compiled grammar of a GBNF text."""
    return GRAMMARS(Constraint("gbnf", text, jump=jump))
