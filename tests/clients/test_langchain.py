"""LangChain's ChatOpenAI: text, streams, tools and structured output by each method."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_openai")

from langchain.agents import create_agent  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402

from tests.clients.answers import MAX_TOKENS, QUESTION, Weather  # noqa: E402


def chat_of(endpoint, **fields):
    return ChatOpenAI(
        model=endpoint.model, base_url=endpoint.openai, api_key=endpoint.key, max_tokens=MAX_TOKENS, max_retries=0,
        seed=1, **fields,
    )  # fmt: skip


@pytest.fixture
def chat(endpoint):
    return chat_of(endpoint)


@tool
def weather(city: str, sunny: bool) -> str:
    """Return the weather of a city."""
    return f"{city}: {sunny}"


def test_text_and_its_stream(chat):
    short = chat.bind(max_tokens=12)
    answer = short.invoke(QUESTION)
    assert answer.content and answer.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in short.stream(QUESTION))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def test_json_mode(endpoint):
    """The mode leaves the schema to the prompt: a grammar stands for a model that follows it."""
    schema = {"structured_outputs": {"json": Weather.model_json_schema()}, "response_format": None}
    model = chat_of(endpoint, extra_body=schema).with_structured_output(Weather, method="json_mode")
    assert isinstance(model.invoke(QUESTION), Weather)


@pytest.mark.parametrize("choice", ["any", "weather", "auto", "none"])
def test_tools(chat, choice):
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    if choice in ("auto", "none"):
        bound = bound.bind(max_tokens=20)
    answer = bound.invoke(QUESTION)
    if choice in ("any", "weather"):
        [call] = answer.tool_calls
        assert call["name"] == "weather" and isinstance(call["args"]["sunny"], bool)
        whole = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert [call["name"] for call in whole.tool_calls] == ["weather"]
        again = [HumanMessage(QUESTION), answer, ToolMessage("sunny", tool_call_id=call["id"])]
        assert isinstance(chat.bind(max_tokens=8).invoke(again), AIMessage)
    if choice == "none":
        assert not answer.tool_calls


def test_an_agent(chat):
    agent = create_agent(chat.bind(max_tokens=40), tools=[weather])
    found = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    assert isinstance(found["messages"][-1], AIMessage)
