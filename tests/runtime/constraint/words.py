"""Grammars over the fake vocabulary, whose tokens are bytes."""

import json
from typing import Any

from llmcli.runtime.constraint.base import Constraint, Grammar
from llmcli.runtime.constraint.compile import GrammarCompiler
from tests.fixtures.fakes import FakeModel


def no_native(constraint: Constraint) -> Grammar:
    raise AssertionError("the fake model knows no engine of llama.cpp's")


GRAMMARS = GrammarCompiler(FakeModel(), no_native)


def schema(value: Any, jump: str = "lossless") -> Grammar:
    return GRAMMARS(
        Constraint("json_schema", value if isinstance(value, str) else json.dumps(value), jump=jump)
    )


def gbnf(text: str, jump: str = "lossless") -> Grammar:
    return GRAMMARS(Constraint("gbnf", text, jump=jump))
