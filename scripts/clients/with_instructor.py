"""The documented calls of instructor in every mode of OpenAI's API, run against the server."""

import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, field_validator

from scripts.clients.calls import MODEL, call, call_each, run

URL = sys.argv[1]
CLIENT = OpenAI(base_url=URL, api_key="none", max_retries=0)
ARGS: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Ann is 25 years old and lives in Rome."}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 2,
}
MODES = ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON")


class Color(StrEnum):
    """A color."""

    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    """Where a user lives."""

    city: Literal["Rome", "Paris"]
    zip: str | None = Field(None, description="postal code", max_length=10)


class User(BaseModel):
    """A user with an address."""

    name: str = Field(description="first name", max_length=20)
    age: int = Field(ge=0, le=150)
    color: Color | None = None
    addresses: list[Address] = Field(default_factory=list, max_length=2)

    @field_validator("name")
    @classmethod
    def validate_name(cls, name: str) -> str:
        """Return the name without spaces at its ends."""
        return name.strip()


class Person(BaseModel):
    """A name and an age."""

    name: str = Field(max_length=20)
    age: int


class Fact(BaseModel):
    """A fact about a person or an address."""

    about: Person | Address


def register_mode(name: str) -> None:
    """Register the calls of one mode."""

    def create(client: OpenAI) -> None:
        user = instructor.from_openai(client, mode=instructor.Mode[name]).create(
            response_model=User, **ARGS
        )
        assert isinstance(user, User)

    def partial(client: OpenAI) -> None:
        patched = instructor.from_openai(client, mode=instructor.Mode[name])
        parts = list(patched.create_partial(response_model=Person, **ARGS))
        assert isinstance(parts[-1], BaseModel) and len(parts) > 1

    call_each(name, {create: "create with a nested response_model", partial: "create_partial"})


for mode in MODES:
    register_mode(mode)


@call
def iterable(client: OpenAI) -> None:
    """TOOLS: create_iterable, and Iterable as response_model"""
    patched = instructor.from_openai(client)
    for people in (
        patched.create_iterable(response_model=Person, **ARGS),
        patched.create(response_model=Iterable[Person], **ARGS),
    ):
        assert all(isinstance(person, Person) for person in people)


@call
def completion(client: OpenAI) -> None:
    """create_with_completion"""
    patched = instructor.from_openai(client)
    person, raw = patched.create_with_completion(response_model=Person, **ARGS)
    assert isinstance(person, Person) and raw.usage.total_tokens > 0


@call
def simple(client: OpenAI) -> None:
    """simple types and literals as response_model"""
    patched = instructor.from_openai(client)
    assert patched.create(response_model=Literal["a", "b"], **ARGS) in ("a", "b")
    assert isinstance(patched.create(response_model=int, **ARGS), int)


@call
def union(client: OpenAI) -> None:
    """a model with a field that is a union of models"""
    patched = instructor.from_openai(client)
    assert isinstance(patched.create(response_model=Fact, **ARGS).about, Person | Address)


@call
def parallel(client: OpenAI) -> None:
    """PARALLEL_TOOLS: an Iterable of a union"""
    patched = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    args = {**ARGS, "tool_choice": "auto"}
    assert patched.create(response_model=Iterable[Person | Address], **args) is not None


@call
def responses(client: OpenAI) -> None:
    """RESPONSES_TOOLS: create"""
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    person = patched.responses.create(
        model=MODEL, input="Ann is 25 years old", response_model=Person, max_output_tokens=200
    )
    assert isinstance(person, Person)


@call
async def asynchronous(client: OpenAI) -> None:
    """AsyncOpenAI: create and create_partial"""
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as inner:
        patched = instructor.from_openai(inner)
        assert isinstance(await patched.create(response_model=Person, **ARGS), Person)
        parts = [part async for part in patched.create_partial(response_model=Person, **ARGS)]
        assert len(parts) > 1


@call
def provider(client: OpenAI) -> None:
    """from_provider: openai and ollama with a base URL"""
    for name in (f"openai/{MODEL}", f"ollama/{MODEL}"):
        patched = instructor.from_provider(name, base_url=URL, api_key="none")
        person = patched.create(response_model=Person, messages=ARGS["messages"], max_tokens=200)
        assert isinstance(person, Person), name


run(CLIENT)
