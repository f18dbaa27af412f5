"""The options that constrain an answer: a grammar or a JSON schema, as text or as a file."""

from typing import TYPE_CHECKING, Any, Literal

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.runtime.constraint.base import Constraint

# for each option: its spelling, the kind of constraint, and whether its value is a file name
CONSTRAINT_FLAGS: dict[str, tuple[str, Literal["gbnf", "json_schema"], bool]] = {
    "grammar": ("--grammar", "gbnf", False),
    "grammar_file": ("--grammar-file", "gbnf", True),
    "json_schema": ("-j", "json_schema", False),
    "json_schema_file": ("-jf", "json_schema", True),
}
ENGINE_FLAGS = {"grammar_engine": "--grammar-engine", "jump": "--jump"}


def take_constraint(typed: dict[str, Any]) -> "Constraint | None":
    """Remove the options of this module from `typed`, and return the constraint that they describe;
    None if there is none. `typed`: the typed options by name.

    The constraint is checked here, before a model is loaded. Raises UserError or UsageError.
    """
    from llmcli.runtime.constraint import gbnf
    from llmcli.runtime.constraint.base import ENGINES, JUMP_MODES, Constraint
    from llmcli.text_input import expand_path, read_text, require_utf8

    sources = {name: typed.pop(name) for name in CONSTRAINT_FLAGS if name in typed}
    engine_options = {name: typed.pop(name) for name in ENGINE_FLAGS if name in typed}
    is_strict = bool(typed.pop("strict_schema", False))
    if is_strict and not {"json_schema", "json_schema_file"} & sources.keys():
        raise UsageError("--strict-schema needs a schema", hint="add one, such as -j SCHEMA")
    for name, allowed in (("grammar_engine", ENGINES), ("jump", JUMP_MODES)):
        if engine_options.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"{ENGINE_FLAGS[name]} is {engine_options[name]!r}",
                hint=f"{ENGINE_FLAGS[name]} takes one of: {', '.join(allowed)}",
            )
    if len(sources) > 1:
        spellings = " and ".join(CONSTRAINT_FLAGS[name][0] for name in sources)
        raise UsageError(f"{spellings} both constrain the answer", hint="give only one of them")
    if not sources:
        if engine_options:
            raise UsageError(
                f"{ENGINE_FLAGS[next(iter(engine_options))]} needs a grammar or schema",
                hint="add one, such as -j SCHEMA",
            )
        return None
    ((name, text),) = sources.items()
    spelling, kind, is_file = CONSTRAINT_FLAGS[name]
    require_utf8(spelling, text)
    if is_file:
        text = read_text(expand_path(text))
    if kind == "json_schema" and engine_options.get("grammar_engine") == "llama":
        raise UsageError(
            "llama.cpp's engine supports GBNF, but not JSON schemas",
            hint="leave out --grammar-engine llama",
        )
    if typed.get("ignore_eos"):
        raise UsageError(
            f"{spelling} ends the answer, but --ignore-eos continues it",
            hint="leave out one of them",
        )
    if kind == "json_schema":
        from llmcli.runtime.constraint.json_schema.check import check_schema  # the import is slow

        check_schema(text, is_strict)
    elif engine_options.get("grammar_engine") == "llama":
        gbnf.check_gbnf(text)
    else:
        gbnf.to_lark(text)
    return Constraint(
        kind,
        text,
        is_strict=is_strict,
        **{
            "engine" if option_name == "grammar_engine" else option_name: engine_options[
                option_name
            ]
            for option_name in engine_options
        },
    )
