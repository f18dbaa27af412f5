#!/usr/bin/env python3
"""Write the JSON schemas of 60 everyday pydantic types, one a line: {"name": …, "schema": …}.

usage: .venv/bin/python scripts/reference/everyday_types.py > tests/cases/schemas/pydantic.jsonl

everyday_types.mjs does the same for zod. tests/cases/test_schemas.py reads both files.
"""

import json
import sys
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

import pydantic
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter
from typing_extensions import TypedDict

T = TypeVar("T")


class Color(Enum):
    """Three colors."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(IntEnum):
    """Levels as numbers."""

    LOW = 1
    HIGH = 2


class Address(BaseModel):
    """A postal address."""

    street: str
    city: str = Field(description="The city's name", examples=["Bonn"])
    zip_code: str = Field(pattern=r"^\d{5}(-\d{4})?$")


class Person(BaseModel):
    """A person with an optional address."""

    name: str = Field(min_length=1, max_length=50)
    age: int = Field(ge=0, le=150)
    address: Address | None = None
    tags: list[str] = []


class Employee(Person):
    """A person with a salary."""

    salary: Decimal = Field(gt=0, decimal_places=2)
    manager: "Employee | None" = None


class Cat(BaseModel):
    """A cat."""

    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"]
    good: bool = True


class Bird(BaseModel):
    """A bird."""

    kind: Literal["bird", "parrot"]
    words: list[str]


class Home(BaseModel):
    """A home with a pet. Its kind says what it is."""

    pet: Cat | Dog | Bird = Field(discriminator="kind")


class Homes(BaseModel):
    """Several pets."""

    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


class Tree(BaseModel):
    """A tree."""

    value: int
    children: list["Tree"] = []


class Chain(BaseModel):
    """A list of links."""

    text: str
    next: "Chain | None" = None


class Box(BaseModel, Generic[T]):
    """A box of anything."""

    content: T
    count: int = 1


class Closed(BaseModel):
    """A model without further fields."""

    model_config = ConfigDict(extra="forbid")
    a: int
    b: str | None = None


class Open(BaseModel):
    """A model with further fields."""

    model_config = ConfigDict(extra="allow")
    a: int


class Aliased(BaseModel):
    """A model with names of another program."""

    user_id: int = Field(alias="userId")
    full_name: str = Field(alias="fullName", title="Full name")


class Configured(BaseModel):
    """A model with examples and a deprecated field."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"a": 1}], "markdownDescription": "**a**"}
    )
    a: int = Field(deprecated=True, json_schema_extra={"x-order": 1})


class Computed(BaseModel):
    """A model with a computed field."""

    width: float
    height: float

    @pydantic.computed_field
    def area(self) -> float:
        """Return the product."""
        return self.width * self.height


class Point(NamedTuple):
    """Two numbers."""

    x: float
    y: float


class Movie(TypedDict):
    """A film as a dictionary."""

    title: str
    year: int


class Partial(TypedDict, total=False):
    """A dictionary whose names may be missing."""

    a: int
    b: str


@dataclass
class Item:
    """A thing with a price."""

    name: str
    price: float
    color: Color = Color.RED


class Step(BaseModel):
    """A step of a calculation."""

    explanation: str
    output: str


class Reasoning(BaseModel):
    """Steps and an answer, as in OpenAI's guide."""

    steps: list[Step]
    final_answer: str


class CalendarEvent(BaseModel):
    """An event, as in OpenAI's guide."""

    name: str
    date: date
    participants: list[str]


class Recipe(BaseModel):
    """A recipe."""

    title: str
    servings: Annotated[int, Field(ge=1, le=20)]
    ingredients: list[tuple[str, float, Literal["g", "ml", "pieces"]]]
    steps: Annotated[list[str], Field(min_length=1, max_length=20)]


class Invoice(BaseModel):
    """An invoice with lines."""

    number: Annotated[str, Field(pattern="^INV-[0-9]{4,}$")]
    issued: date
    paid_at: datetime | None = None
    lines: list[Item]
    totals: dict[str, Decimal]
    currency: Literal["EUR", "USD"] = "EUR"


class Query(BaseModel):
    """The arguments of a search tool."""

    text: str
    limit: pydantic.PositiveInt = 10
    after: datetime | date | None = None
    filters: dict[str, str | int | list[str]] = {}


class Contact(BaseModel):
    """A contact with text formats."""

    mail: Annotated[str, Field(json_schema_extra={"format": "email"})]
    site: pydantic.HttpUrl
    host: IPv4Address | IPv6Address


class Shape(RootModel[Annotated[Cat | Dog, Field(discriminator="kind")]]):
    """A union as the root."""


class Names(RootModel[list[str]]):
    """A list as the root."""


class Scores(RootModel[dict[str, float]]):
    """A dictionary as the root."""


class Expression(BaseModel):
    """An expression with operands of two types."""

    operator: Literal["+", "-", "*", "/"]
    operands: list["Expression | float"]


class Settings(BaseModel):
    """Settings with defaults of all kinds."""

    verbose: bool = False
    retries: Annotated[int, Field(multiple_of=5)] = 5
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    level: Level = Level.LOW
    colors: set[Color] = {Color.RED}
    secret: pydantic.SecretStr | None = None
    folder: Path = Path("/tmp")


TYPES: dict[str, Any] = {
    **{
        kind.__name__: kind
        for kind in (
            *(Address, Person, Employee, Home, Homes, Tree, Chain, Closed, Open, Aliased),
            *(Configured, Computed, Reasoning, CalendarEvent, Recipe, Invoice, Query, Contact),
            *(Shape, Names, Scores, Expression, Settings, Point, Movie, Partial, Item, Color),
        )
    },
    "Box of int": Box[int],
    "Box of Box of str": Box[Box[str]],
    "Level": Level,
    "list of Person": list[Person],
    "tuple": tuple[int, str, bool],
    "tuple of any length": tuple[float, ...],
    "set of int": set[int],
    "frozenset of Literal": frozenset[Literal["a", "b"]],
    "dict of Literal": dict[Literal["x", "y"], int],
    "dict of int keys": dict[int, str],
    "dict of patterned keys": dict[Annotated[str, Field(pattern="^k")], int],
    "Union of models": Cat | Address | None,
    "Literal of several types": Literal["a", 1, True, None],
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
    "UUID": UUID,
    "UUID4": pydantic.UUID4,
    "AnyUrl": pydantic.AnyUrl,
    "IPv4Network": IPv4Network,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "Decimal": Decimal,
    "bytes": bytes,
    "Base64Str": pydantic.Base64Str,
    "Json": pydantic.Json[list[int]],
    "Pattern": Pattern[str],
    "AwareDatetime": pydantic.AwareDatetime,
    "PastDate": pydantic.PastDate,
    "ByteSize": pydantic.ByteSize,
    "conint of 64 bits": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "conlist": Annotated[list[int], Field(min_length=2, max_length=4)],
}


def main() -> None:
    """Write one line for each type."""
    for name, kind in TYPES.items():
        mode: Any = "serialization" if name == "Computed" else "validation"
        schema = TypeAdapter(kind).json_schema(mode=mode)
        sys.stdout.write(json.dumps({"name": name, "schema": schema}) + "\n")


if __name__ == "__main__":
    main()
