"""What the clients ask for: a bounded answer and tools, which any model gives under a grammar, even a random one."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

QUESTION = "What is the weather in Paris? Answer with the city, the days and whether it is sunny."
MESSAGES = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 1500  # a random model writes much white space between the tokens of JSON


class Bounded(BaseModel, extra="forbid"):
    """A model with no other fields, of which a random model would write many."""


class Weather(Bounded):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]
    sunny: bool


class Sum(Bounded):
    """The sum of two numbers."""

    first: Literal[1, 2]
    second: Literal[3, 4]


def tool(model: type[BaseModel], name: str, **fields: object) -> dict[str, object]:
    """Return a function tool with the fields of `model` as arguments."""
    schema = model.model_json_schema()
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": schema, **fields}}


TOOLS = [tool(Weather, "weather"), tool(Sum, "add")]
