"""RequestBody: the base class of the models of request bodies. A model is one object of a request:
its fields, their types, and what the server does with each of them.

From the models come the checks of requests (checks.py), /openapi.json (openapi.py) and the page of
docs that lists all fields (reference.py).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, core_schema

Effect = Literal["honored", "ignored", "noted", "refused"]
EFFECT_KEY, HARMLESS_KEY = "x-effect", "x-harmless"
# Values of a refused field that ask for nothing, so that the request is answered, and of a noted
# field that lead to no note.
HARMLESS_VALUES: tuple[Any, ...] = (None, [], {}, "", False, -1)
# They are also the tags of union members, which are in the locations of pydantic's errors: the tag of
# objects must be no name of a field.
TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}
BUILDING = threading.RLock()
PATH_MARK = "\x00path\x00"  # stands for the path of a wrong value in the message of problem()


def json_type(value: object) -> str:
    """Return the type of a JSON value in words for an error message, such as "a list"."""
    return "null" if value is None else TYPE_NAMES.get(type(value), type(value).__name__)


@dataclass(frozen=True, slots=True)
class FieldEffect:
    """What the server does with a field. `harmless`: values of a refused or noted field that ask
    for nothing, in addition to HARMLESS_VALUES.
    """

    effect: Effect
    description: str
    harmless: tuple[Any, ...] = ()

    def refuses(self, value: Any) -> bool:
        """Return whether a request with this value of the field is refused."""
        return self.effect == "refused" and self._asks(value)

    def notes(self, value: Any) -> bool:
        """Return whether an answer to a request with this value of the field has a note."""
        return self.effect == "noted" and self._asks(value)

    def _asks(self, value: Any) -> bool:
        """Return whether a value asks for something that the server does not do anyway."""
        return not any(_is_same(value, other) for other in (*HARMLESS_VALUES, *self.harmless))


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON, where 0 is not false."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


class RequestBody(BaseModel):
    """One object of a request. Null counts as a missing field. Fields that the model does not have
    are in `model_extra`; checks.py decides about them.

    - `origin`: the API whose reference describes the fields of this class.
    - `reports_unknown`: whether fields that the model does not have are refused or noted. Clients
      send messages back as they received them, also from other servers, so unknown fields of
      messages are not reported.
    """

    # building the validators of all models takes half a second, so each is built when it is needed
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), defer_build=True)
    origin: ClassVar[str] = "llmcli"
    reports_unknown: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _drop_null_fields(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @classmethod
    def build(cls) -> None:
        """Build the validator. Call this before the first use, because several threads may read
        requests at once and pydantic's own building must not run twice at the same time.
        """
        if not cls.__pydantic_complete__:
            with BUILDING:
                cls.model_rebuild()

    @classmethod
    def effects(cls) -> Mapping[str, FieldEffect]:
        """Return what the server does with each field, by the name of the field in JSON."""
        return _effects(cls)

    @classmethod
    def advice_about(cls, name: str) -> str | None:
        """Return what to do instead of a field that the model does not have; None if nothing is
        known about it.
        """
        return None

    @classmethod
    def refusal_fields(cls, name: str) -> Mapping[str, Any]:
        """Return additional fields of the error object for a refused field, by its name in JSON.
        Some clients read from them what they can do instead.
        """
        return {}

    @classmethod
    def origin_of(cls, name: str) -> str:
        """Return the API whose reference describes the field with this Python name."""
        return next(
            owner.origin
            for owner in cls.__mro__
            if issubclass(owner, RequestBody) and name in owner.__annotations__
        )


@cache
def _effects(body_type: type[RequestBody]) -> Mapping[str, FieldEffect]:
    effects = {}
    for name, info in body_type.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        effect: Any = extra.get(EFFECT_KEY, "honored")
        harmless: Any = extra.get(HARMLESS_KEY, ())
        effects[info.alias or name] = FieldEffect(effect, info.description or "", tuple(harmless))
    return effects


def honored(description: str, default: Any = None, **constraints: Any) -> Any:
    """Return a field that the server follows. `description`: what it does. `constraints`: further
    arguments of pydantic's Field. With `default` Ellipsis, the field is required.
    """
    extra: dict[str, Any] = {EFFECT_KEY: "honored", **constraints.pop("json_schema_extra", {})}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def ignored(reason: str, **constraints: Any) -> Any:
    """Return a field that is accepted and has no effect on the answer. `reason`: why it has none.
    Its type should be Any: a value without effect is not checked.
    """
    return _without_effect("ignored", reason, (), constraints)


def noted(reason: str, *harmless: Any, **constraints: Any) -> Any:
    """Return a field that is accepted without effect although a client may expect one. A note in
    the answer's metadata tells the client the `reason`. `harmless`: values that ask for what the
    server does anyway.
    """
    return _without_effect("noted", reason, harmless, constraints)


def refused(advice: str, *harmless: Any, **constraints: Any) -> Any:
    """Return a field that is not supported and would change the answer, so that a request with it
    is refused. `advice`: what to do instead, or why it is not supported. `harmless`: values that
    ask for what the server does anyway.
    """
    return _without_effect("refused", advice, harmless, constraints)


def _without_effect(
    effect: Effect, reason: str, harmless: tuple[Any, ...], constraints: Mapping[str, Any]
) -> Any:
    extra: dict[str, Any] = {EFFECT_KEY: effect}
    extra |= {HARMLESS_KEY: list(harmless)} if harmless else {}
    return Field(None, description=reason, json_schema_extra=extra, **constraints)


def expected(words: str) -> PydanticCustomError:
    """Return the error of a value that is not what `words` say, for example "a list of texts"."""
    return PydanticCustomError("expected", "{words}", {"words": words})


def problem(message: str) -> PydanticCustomError:
    """Return the error of a wrong value with its own message. PATH_MARK in the message stands for
    the path of the value in the request.
    """
    return PydanticCustomError("problem", "{words}", {"words": message})


def missing(name: str) -> PydanticCustomError:
    """Return the error of an object without the field `name`, which it needs."""
    return PydanticCustomError("missing_field", "{name}", {"name": name})


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Annotates a JSON object that is not checked further, such as a JSON schema. `words`: the
    object for errors, such as "a JSON schema".
    """

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "object"}

    def read(self, value: Any) -> dict[str, Any]:
        """Return the object. Raises PydanticCustomError for any other value."""
        if not isinstance(value, dict):
            raise expected(self.words)
        return value


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """Annotates a whole number from `low` to `high`, both included. 4.0, which some languages write
    for 4, is such a number.
    """

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def read(self, value: Any) -> int:
        """Return the number. Raises PydanticCustomError for any other value."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise expected("a whole number")
        if not self.low <= value <= self.high:
            raise expected(f"a whole number from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class MaxEntries:
    """Annotates a list with at most `limit` entries. The number is checked before the entries."""

    limit: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        json_schema: dict[str, Any] = handler(schema)
        return {**json_schema, "maxItems": self.limit} if "items" in json_schema else json_schema

    def check(self, value: Any) -> Any:
        """Return the value. Raises PydanticCustomError for a list with too many entries."""
        if isinstance(value, list) and len(value) > self.limit:
            raise problem(f"{PATH_MARK} has {len(value):,} entries; the limit is {self.limit:,}")
        return value


@dataclass(frozen=True, slots=True)
class Either:
    """Annotates a union whose members have different JSON types. `words`: the union for errors,
    such as "text or a list of parts". An error inside a member names its path in the request.
    """

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        members = {
            _json_type_of(member): handler.generate_schema(member) for member in get_args(source)
        }
        return core_schema.tagged_union_schema(
            members,
            lambda value: TYPE_NAMES.get(type(value)),
            custom_error_type="expected",
            custom_error_message="{words}",
            custom_error_context={"words": self.words},
        )


def _json_type_of(annotation: Any) -> str:
    """Return the JSON type of the values that an annotation describes."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _json_type_of(get_args(annotation)[0])
    if origin is Literal:
        return TYPE_NAMES[type(get_args(annotation)[0])]
    return TYPE_NAMES.get(origin or annotation, TYPE_NAMES[dict])
