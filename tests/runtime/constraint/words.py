"""Compile grammars for the fake vocabulary, whose tokens are bytes."""

import json
from typing import Any

from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.constraint.compile import GrammarCompiler
from tests.fixtures.fakes import FakeModel


def refuse_native(constraint: Constraint) -> Grammar:
    raise AssertionError("llama.cpp's grammars need a real model")


GRAMMARS = GrammarCompiler(FakeModel(), refuse_native)


def schema(value: Any, jump: str = "lossless") -> Grammar:
    """Return the compiled grammar of a JSON schema, given as a value or as JSON text."""
    return GRAMMARS(
        Constraint("json_schema", value if isinstance(value, str) else json.dumps(value), jump=jump)
    )


def gbnf(text: str, jump: str = "lossless") -> Grammar:
    """Return the compiled grammar of a GBNF text."""
    return GRAMMARS(Constraint("gbnf", text, jump=jump))
