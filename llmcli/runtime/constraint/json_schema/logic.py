"""Rewrite the keywords of JSON Schema that combine schemas: references, alternatives, conditions
and negations.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llmcli.runtime.constraint.json_schema.document import Location
from llmcli.runtime.constraint.json_schema.facts import ValueFacts
from llmcli.runtime.constraint.json_schema.negation import NoNegation
from llmcli.runtime.constraint.json_schema.objects_and_arrays import close_object
from llmcli.runtime.constraint.json_schema.writer import (
    SchemaAlternatives,
    SchemaDraft,
    SchemaWriter,
)

MAX_EXCLUSIVE = 24  # maximum number of alternatives of oneOf that are compared with one another


def write_reference(writer: SchemaWriter, value: Any) -> None:
    """Write `$ref`."""
    if not isinstance(value, str):
        writer.refuse("$ref", value)
        return
    target = writer.rewriter.document.resolve(value, writer.location)
    if target is None:
        is_remote = not value.startswith("#")
        reason = "nothing is fetched" if is_remote else "there is no such schema"
        writer.note(f"$ref {json.dumps(value)[:100]}", reason)
    else:
        writer.add({"$ref": writer.rewriter.reference(target, writer.inner_scope)})


def write_dynamic_reference(writer: SchemaWriter, value: Any) -> None:
    """Write `$dynamicRef`, if it means the same schema wherever it is reached from."""
    target = isinstance(value, str) and writer.rewriter.document.resolve_dynamic(
        value, writer.location
    )
    if isinstance(target, tuple):
        writer.add({"$ref": writer.rewriter.reference(target, writer.inner_scope)})
    else:
        writer.note("$dynamicRef", "it depends on the way to it")


def write_recursive_reference(writer: SchemaWriter, value: Any) -> None:
    """Write `$recursiveRef` of draft 2019-09, if no $recursiveAnchor changes its meaning."""
    document = writer.rewriter.document
    target = document.resolve("#", writer.location)
    if target is None or value != "#" or document.has_recursive_anchor:
        writer.note("$recursiveRef", "it depends on the way to it")
    else:
        writer.add({"$ref": writer.rewriter.reference(target, writer.inner_scope)})


def write_all(writer: SchemaWriter, value: Any) -> None:
    """Write `allOf`."""
    if not isinstance(value, list):
        writer.refuse("allOf", value)
        return
    writer.result["allOf"] = [
        writer.rewrite("allOf", number, scope=writer.inner_scope) for number in range(len(value))
    ]


def write_alternatives(writer: SchemaWriter, key: str, value: Any) -> None:
    """Write `anyOf` or `oneOf`. For oneOf, `resolve_exclusive` must follow."""
    if not isinstance(value, list):
        writer.refuse(key, value)
        return
    branches = [
        writer.rewrite(key, number, scope=writer.inner_scope) for number in range(len(value))
    ]
    locations: list[Location] = [
        (*writer.location, key, str(number)) for number in range(len(value))
    ]
    _add_discriminator(writer, branches, locations)
    writer.add({"anyOf": branches})
    writer.alternatives.append(SchemaAlternatives(branches, locations, key, key == "oneOf"))


def _add_discriminator(
    writer: SchemaWriter, branches: list[Any], locations: list[Location]
) -> None:
    """Give each alternative the name that OpenAPI's `discriminator` has for it, unless its schema
    says so already.
    """
    discriminator = writer.schema.get("discriminator")
    if not isinstance(discriminator, dict):
        return
    name = discriminator.get("propertyName")
    if not isinstance(name, str):
        return
    document = writer.rewriter.document
    mapping = discriminator.get("mapping")
    targets = {
        document.resolve(target, writer.location): word
        for word, target in (mapping.items() if isinstance(mapping, dict) else ())
        if isinstance(target, str)
    }
    for number, location in enumerate(locations):
        reference = document.value(location)
        reference = reference.get("$ref") if isinstance(reference, dict) else None
        target = document.resolve(reference, location) if isinstance(reference, str) else None
        if target is None or _has_constant(writer, target, name):
            continue
        word = targets.get(target, target[-1] if target else "")
        branches[number] = {
            "allOf": [
                branches[number],
                {"type": "object", "properties": {name: {"const": word}}, "required": [name]},
            ]
        }


def _has_constant(writer: SchemaWriter, location: Location, name: str) -> bool:
    """Return whether the schema at a location has constants for a property."""
    schema = writer.rewriter.document.value(location)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    inner = properties.get(name) if isinstance(properties, dict) else None
    return isinstance(inner, dict) and not {"const", "enum", "$ref"}.isdisjoint(inner)


def write_condition(writer: SchemaWriter, value: Any) -> None:
    """Write `if` with `then` and `else`: the condition and `then` hold, or its opposite and
    `else`.
    """
    schema, rewriter = writer.schema, writer.rewriter
    then, otherwise = (
        writer.rewrite(key, scope=writer.inner_scope) if key in schema else True
        for key in ("then", "else")
    )
    if then is True and otherwise is True:
        return
    condition = rewriter.write_exactly(value, (*writer.location, "if"))

    def finish() -> None:
        holds = {"allOf": [condition.schema, then]}
        opposite = _negate(writer, condition)
        if opposite is None:
            writer.note("if", "its opposite cannot be followed")
        fails = otherwise if opposite is None else {"allOf": [opposite, otherwise]}
        writer.conjuncts.append({"anyOf": [holds, fails]})
        writer.join_conjuncts()

    rewriter.do_later(finish)


def write_negation(writer: SchemaWriter, value: Any) -> None:
    """Write `not` as the opposite of its schema."""
    negated = writer.rewriter.write_exactly(value, (*writer.location, "not"))

    def finish() -> None:
        opposite = _negate(writer, negated)
        if opposite is None:
            writer.note("not")
        elif opposite is not True:
            writer.conjuncts.append(opposite)
            writer.join_conjuncts()

    writer.rewriter.do_later(finish)


def _negate(writer: SchemaWriter, draft: SchemaDraft) -> Any:
    """Return the opposite of a schema, or None if it cannot be said."""
    if writer.rewriter.is_lenient or not writer.rewriter.finish_exactly(draft):
        return None
    try:
        return writer.rewriter.negator.negate(draft.schema)
    except NoNegation:
        return None


def close_alternatives(writer: SchemaWriter, base: ValueFacts, unevaluated: Any = None) -> None:
    """Close each alternative of the only list of alternatives by itself.

    `base`: the facts about the value without the alternatives. `unevaluated`: the schema of
    unevaluatedProperties; None closes only alternatives that list properties.
    """
    alternatives = writer.alternatives[0]
    for number, location in enumerate(alternatives.locations):
        together = ValueFacts()
        together.add(base)
        together.add(writer.rewriter.facts(location))
        if unevaluated is None:
            closer = close_object(together) if together.must_close else None
        else:
            is_open = together.opens
            closer = None if is_open else close_object(together, unevaluated, with_required=False)
        if closer is not None:
            branch = alternatives.branches[number]
            alternatives.branches[number] = {"allOf": [branch, closer]}


def resolve_exclusive(writer: SchemaWriter) -> None:
    """Make sure that at most one alternative of each oneOf holds. Where two may hold, each excludes
    the other. Where that cannot be said either, a note is recorded.
    """
    rewriter = writer.rewriter
    for alternatives in writer.alternatives:
        if not alternatives.is_exclusive or len(alternatives.branches) < 2:
            continue
        if _are_constants(alternatives.branches):
            continue
        exact = [
            rewriter.write_exactly(rewriter.document.value(location), location)
            for location in alternatives.locations
        ]
        if rewriter.prover.are_distinct([draft.schema for draft in exact]):
            continue
        if len(alternatives.branches) > MAX_EXCLUSIVE:
            writer.note("oneOf", f"more than {MAX_EXCLUSIVE} alternatives")
            continue
        base = {key: value for key, value in writer.result.items() if key != "anyOf"}
        excluding = [
            _exclude_others(writer, number, branch, exact, base)
            for number, branch in enumerate(alternatives.branches)
        ]
        if any(branch is None for branch in excluding):
            writer.note("oneOf", "more than one alternative may hold")
        else:
            alternatives.branches[:] = excluding


def _are_constants(branches: list[Any]) -> bool:
    """Return whether all alternatives are constant texts that differ."""
    constants = [branch.get("const") for branch in branches if isinstance(branch, dict)]
    texts = {constant for constant in constants if isinstance(constant, str)}
    return len(texts) == len(branches)


def _exclude_others(
    writer: SchemaWriter, number: int, branch: Any, exact: list[SchemaDraft], base: Any
) -> Any:
    """Return an alternative of oneOf so that no other one holds with it, or None if that cannot be
    said. `exact`: the alternatives as they are in the document. `base`: what holds with each of
    them.
    """
    prover, conjuncts = writer.rewriter.prover, [branch]
    for index, other in enumerate(exact):
        if index == number or prover.are_disjoint({"allOf": [branch, base]}, other.schema):
            continue
        opposite = _negate(writer, other)
        if opposite is None:
            return None
        conjuncts.append(opposite)
    if len(conjuncts) == 1:
        return branch
    result = {"allOf": conjuncts}
    return None if prover.is_empty({"allOf": [result, base]}) else result


KEYWORDS: Mapping[str, Callable[[SchemaWriter, Any], None]] = {
    "$ref": write_reference,
    "$dynamicRef": write_dynamic_reference,
    "$recursiveRef": write_recursive_reference,
    "allOf": write_all,
    "anyOf": lambda writer, value: write_alternatives(writer, "anyOf", value),
    "oneOf": lambda writer, value: write_alternatives(writer, "oneOf", value),
    "if": write_condition,
    "not": write_negation,
}
