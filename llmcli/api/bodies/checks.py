"""Checks request bodies with their models. Every error names the path of the wrong field, such as
`messages[0].content`.

A field that the model does not have is refused if its name looks like a misspelling of one of the
model's fields, because then the client expects an effect. Otherwise it is accepted, and a note in
the answer's metadata names it.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from llmcli.api.bodies.base import PATH_MARK, TYPE_NAMES, RequestBody, json_type
from llmcli.api.errors import ApiError

BodyT = TypeVar("BodyT", bound=RequestBody)
MISSPELLING_SIMILARITY = 0.85  # of two names, by difflib
MAX_SHOWN_CHARACTERS = 60  # of a value in an error message
MAX_NOTES = 32  # notes about a single request; further ones are counted
MAX_UNKNOWN_NAMES = 64  # of different names in a request; each is compared with all fields
MAX_PATH_CHARACTERS = 100  # of an unknown field in an error message
# pydantic's error type -> the expected value in words
EXPECTED_WORDS = {
    "string_type": TYPE_NAMES[str],
    "bool_type": TYPE_NAMES[bool],
    "int_type": TYPE_NAMES[int],
    "float_type": TYPE_NAMES[float],
    "finite_number": TYPE_NAMES[float],
    "list_type": TYPE_NAMES[list],
}
PathElements = Sequence[str | int]


def read_body(
    body_type: type[BodyT],
    document: Mapping[str, Any],
    notes: list[str],
    where: str = "",
    path: str = "",
) -> BodyT:
    """Return the JSON object of a request as its model. Notes about fields that have no effect are
    appended to `notes`. `where`: the path of the API, for messages about unknown fields. `path`: the
    path of the object in the request; "" for the request itself.

    Raises ApiError for a value of the wrong type, a missing or refused field, and a misspelled one.
    """
    body_type.build()
    try:
        body = body_type.model_validate(document)
    except ValidationError as error:
        raise _api_error(error, document, path) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    found = list(_FieldChecker(where).check(body, path))
    notes += found[:MAX_NOTES]
    if len(found) > MAX_NOTES:
        notes.append(f"{len(found) - MAX_NOTES} more fields were ignored")
    return body


def field_path(elements: PathElements, path: str = "") -> str:
    """Return the path of a value for error messages, such as `messages[0].content`. `path`: the path
    of the object in which the elements are.
    """
    for element in elements:
        path += f"[{element}]" if isinstance(element, int) else f".{element}" if path else element
    return path


def _api_error(error: ValidationError, document: Any, path: str) -> ApiError:
    """Convert the first error of a validation. `path`: the path of the document in the request."""
    first = error.errors(include_url=False, include_input=False)[0]
    elements, value = _locate(first["loc"], document)
    path = field_path(elements, path)
    match first["type"]:
        case "missing":
            return ApiError(f"{path} is missing", param=path)
        case "missing_field":
            inner = field_path([str(first["ctx"]["name"])], path)
            return ApiError(f"{inner} is missing", param=inner)
        case "problem":
            words = str(first["ctx"]["words"])
            return ApiError(words.replace(PATH_MARK, path), param=path or None)
        case "expected":
            return wrong_value(path, value, str(first["ctx"]["words"]))
        case "literal_error":
            choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
            return wrong_value(path, value, f"one of {choices}" if ", " in choices else choices)
        case "model_type" | "model_attributes_type" | "dict_type":
            return ApiError(f"{path} must be an object, not {json_type(value)}", param=path)
        case kind if kind in EXPECTED_WORDS:
            return wrong_value(path, value, EXPECTED_WORDS[kind])
    return ApiError(f"{path}: {first['msg']}", param=path or None)


def wrong_value(path: str, value: Any, words: str) -> ApiError:
    """Return the error for a value that is not what `words` say, for example "a list"."""
    shown = (
        repr(value)[:MAX_SHOWN_CHARACTERS]
        if isinstance(value, str | int | float)
        else json_type(value)
    )
    shown = shown.lower() if isinstance(value, bool) else shown
    return ApiError(f"{path} must be {words}, not {shown}", param=path)


def _locate(location: PathElements, document: Any) -> tuple[list[str | int], Any]:
    """Return the elements of an error's location that are keys or indexes of the document, and the
    value there. pydantic's locations also contain the tags of union members.
    """
    elements: list[str | int] = []
    value = document
    for number, element in enumerate(location):
        if isinstance(value, dict) and isinstance(element, str):
            is_last = number == len(location) - 1
            if element in value or is_last:
                elements.append(element)
                value = value.get(element)
        elif isinstance(value, list) and isinstance(element, int):
            elements.append(element)
            value = value[element] if element < len(value) else None
    return elements, value


class _FieldChecker:
    """Checks the fields of one request that are refused, without effect, or unknown. `where`: the
    path of the API, for messages about unknown fields.
    """

    def __init__(self, where: str) -> None:
        self._where = f" of {where}" if where else ""
        # a body type and an unknown name -> the name of the field that it is a misspelling of
        self._spelled: dict[tuple[type[RequestBody], str], str | None] = {}

    def check(self, body: RequestBody, path: str = "") -> Iterator[str]:
        """Yield a note for each field without effect of a body and of the objects in it. Raises
        ApiError for refused and misspelled fields.
        """
        effects = type(body).effects()
        fields = type(body).model_fields
        for name in sorted(body.model_fields_set & fields.keys()):
            json_name, value = fields[name].alias or name, getattr(body, name)
            inner = f"{path}.{json_name}" if path else json_name
            effect = effects[json_name]
            if effect.refuses(value):
                raise ApiError(
                    f"{inner} is not supported: {effect.description}",
                    param=inner,
                    **type(body).refusal_fields(json_name),
                )
            if effect.notes(value):
                yield f"{inner} has no effect: {effect.description}"
            yield from self._check_inner(value, inner)
        if type(body).reports_unknown:
            for name in sorted(body.model_extra or ()):
                yield self._check_unknown(type(body), name, f"{path}.{name}" if path else name)

    def _check_inner(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, RequestBody):
            yield from self.check(value, path)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, RequestBody):
                    yield from self.check(entry, f"{path}[{index}]")

    def _check_unknown(self, body_type: type[RequestBody], name: str, path: str) -> str:
        """Return a note about a field that the model does not have. Raises ApiError if it is a
        misspelling, or if the model knows what to do instead.
        """
        shown = path[:MAX_PATH_CHARACTERS]
        if advice := body_type.advice_about(name):
            raise ApiError(f"{shown} is not a field{self._where}: {advice}", param=shown)
        key = body_type, name
        if key not in self._spelled:
            if len(self._spelled) == MAX_UNKNOWN_NAMES:
                raise ApiError(
                    f"the request has more than {MAX_UNKNOWN_NAMES} unknown fields, such as {shown}",
                    param=shown,
                )
            self._spelled[key] = find_misspelled(name, body_type.effects())
        if (spelled := self._spelled[key]) is None:
            return f"{shown} is not a field{self._where} and was ignored"
        effect = body_type.effects()[spelled]
        if effect.effect == "refused":
            raise ApiError(f"{shown} is not supported: {effect.description}", param=shown)
        raise ApiError(f"{shown} is not a field{self._where}; did you mean {spelled}?", param=shown)


def find_misspelled(name: str, names: Mapping[str, Any]) -> str | None:
    """Return the name of a field that `name` is probably a misspelling of, or None. maxTokens and
    max-tokens are misspellings of max_tokens.
    """
    if len(name) > MAX_PATH_CHARACTERS:
        return None
    plain = {_letters(known): known for known in names}
    if spelled := plain.get(_letters(name)):
        return spelled
    near = get_close_matches(name.lower(), names, 1, MISSPELLING_SIMILARITY)
    return near[0] if near else None


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
