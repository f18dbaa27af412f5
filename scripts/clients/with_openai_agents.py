"""The documented calls of the OpenAI Agents SDK through the Responses and Chat Completions APIs,
run against the server.
"""

import asyncio
import sys
from dataclasses import replace
from typing import Any, Literal

from agents import (
    Agent,
    AgentOutputSchema,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    input_guardrail,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from scripts.clients.calls import MODEL, call, call_each, run

CLIENT = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
MODELS: dict[str, Any] = {
    "OpenAIResponsesModel": OpenAIResponsesModel(MODEL, CLIENT),
    "OpenAIChatCompletionsModel": OpenAIChatCompletionsModel(MODEL, CLIENT),
}
SETTINGS = ModelSettings(max_tokens=200, temperature=0)
FORCED = ModelSettings(max_tokens=200, temperature=0, tool_choice="required")
SINGLE = replace(FORCED, parallel_tool_calls=False)
set_tracing_disabled(True)


class Event(BaseModel):
    """An event in a calendar."""

    name: Literal["fair", "party"]
    date: str | None = Field(max_length=10)
    people: list[Literal["Ann", "Bob"]] = Field(max_length=2)


@function_tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city.
        unit: The unit of the temperature.
    """
    return f"sunny in {city}"


@function_tool(strict_mode=False)
def list_people(filters: dict[str, Any] | None = None) -> str:
    """List the people who fit filters."""
    return "Ann, Bob"


def register_model(name: str) -> None:
    """Register the calls of one model class."""
    usual: Any = {"name": "Assistant", "model": MODELS[name], "model_settings": SETTINGS}

    def run_sync() -> None:
        agent = Agent(**usual, instructions="You are a helpful assistant. Be brief.")
        # run_sync needs a thread without an event loop that is running
        result = Runner.run_sync(agent, "Where is Rome?")
        assert result.final_output and result.context_wrapper.usage.output_tokens > 0

    async def streamed() -> None:
        result = Runner.run_streamed(Agent(**usual, instructions="Be brief."), "Where is Rome?")
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds and result.final_output

    async def tools() -> None:
        agent = Agent(**{**usual, "model_settings": FORCED}, tools=[get_weather, list_people])
        result = await Runner.run(agent, "What is the weather in Rome?", max_turns=4)
        assert any(item.type == "tool_call_output_item" for item in result.new_items)

    async def tools_streamed() -> None:
        agent = Agent(**{**usual, "model_settings": FORCED}, tools=[get_weather])
        result = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=4)
        names = [getattr(event, "name", "") async for event in result.stream_events()]
        assert "tool_called" in names and "tool_output" in names

    async def structured() -> None:
        agent = Agent(**usual, output_type=Event)
        assert isinstance((await Runner.run(agent, "A party of Ann")).final_output, Event)
        loose = Agent(**usual, output_type=AgentOutputSchema(Event, strict_json_schema=False))
        assert isinstance((await Runner.run(loose, "A party of Ann")).final_output, Event)

    async def structured_with_tools() -> None:
        settings = {**usual, "model_settings": FORCED}
        agent = Agent(**settings, tools=[get_weather], output_type=Event)
        result = await Runner.run(agent, "Weather in Rome, then a party", max_turns=4)
        assert isinstance(result.final_output, Event)

    async def handoffs() -> None:
        spanish = Agent(**{**usual, "name": "Spanish"}, instructions="Reply in Spanish.")
        settings = {**usual, "model_settings": FORCED}
        triage = Agent(**settings, instructions="Hand off.", handoffs=[handoff(spanish)])
        result = await Runner.run(triage, "Hola", max_turns=4)
        assert result.last_agent.name == "Spanish"

    async def agents_as_tools() -> None:
        helper = Agent(**{**usual, "name": "Translator"}, instructions="Translate to French.")
        tool = helper.as_tool(tool_name="translate", tool_description="Translate a text")
        agent = Agent(**{**usual, "model_settings": FORCED}, tools=[tool])
        result = await Runner.run(agent, "Translate: hello", max_turns=4)
        assert any(item.type == "tool_call_output_item" for item in result.new_items)

    async def session() -> None:
        agent, memory = Agent(**usual), SQLiteSession("one")
        await Runner.run(agent, "My name is Ann. Be brief.", session=memory)
        await Runner.run(agent, "What is my name?", session=memory)
        assert len(await memory.get_items()) == 4

    async def ends() -> None:
        endless = Agent(
            **{**usual, "model_settings": SINGLE}, tools=[get_weather], reset_tool_choice=False
        )
        try:
            await Runner.run(endless, "Weather?", max_turns=2)
        except MaxTurnsExceeded:
            return
        raise AssertionError("it did not call tools")

    call_each(
        name,
        {
            run_sync: "Runner.run_sync",
            streamed: "Runner.run_streamed",
            tools: "function tools, with strict mode and without",
            tools_streamed: "function tools with run_streamed",
            structured: "output_type, strict and not",
            structured_with_tools: "output_type with tools",
            handoffs: "handoffs",
            agents_as_tools: "an agent as a tool",
            session: "SQLiteSession with two turns",
            ends: "a loop of calls ends by max_turns",
        },
    )


for model_name in MODELS:
    register_model(model_name)


@call
async def guardrail() -> None:
    """an input guardrail"""

    @input_guardrail
    async def refuse(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        await asyncio.sleep(0)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    model = MODELS["OpenAIChatCompletionsModel"]
    agent = Agent(name="Assistant", model=model, model_settings=SETTINGS, input_guardrails=[refuse])
    try:
        await Runner.run(agent, "Hello")
    except InputGuardrailTripwireTriggered:
        return
    raise AssertionError("the guardrail did not trip")


run()
