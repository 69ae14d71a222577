"""The served model's formats of tool calls and reasoning, and parsers of its chat outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ConfigError, RequestError
from engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from engine.text.conversation import Conversation, reads
from engine.text.parsing.call_tags import constrained
from engine.text.parsing.chat import ChatParser
from engine.text.parsing.formats import Format
from engine.text.parsing.reasoning import ReasoningFormat
from engine.text.parsing.selection import AUTO, reasoning_format, tool_format
from engine.text.parsing.tool_calls import ToolCallParser
from engine.text.parsing.tool_use import ToolUse
from engine.text.tokenizer import Tokenizer

MakeParser = Callable[[], ChatParser]


@dataclass(frozen=True)
class OutputPlan:
    """What constrains a chat's outputs, and what parses each of them; None: nothing."""

    make_parser: MakeParser | None
    constraint: StructuredOutputs | None


class ChatFormats:
    """Formats by name or by the model's chat template. Raises ConfigError for a name that can't be used.

    `close_objects`: as in ServerConfig.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO,
        close_objects: str = "tools",
    ):  # fmt: skip
        self._close_objects = close_objects
        template = tokenizer.chat_template(with_tools=True) if tokenizer is not None else ""
        if template and not reads(template, "tools") and tool_parser == AUTO:
            tool_parser = "hermes"  # the format in which such a template gets its tools, as text
        added = tokenizer.backend.get_added_tokens_decoder().values() if tokenizer is not None else ()
        self._specials = frozenset(token.content for token in added if token.special)
        self.tools: type[Format] | None = tool_format(tool_parser, template)
        self.reasoning: ReasoningFormat | None = reasoning_format(reasoning_parser, template)
        if template and not reads(template, "tools") and self.tools is not None and self.tools.name != "hermes":
            raise ConfigError(
                f"tool_call_parser={tool_parser!r}: the model's chat template takes no tools, so they are described in "
                "Hermes' format: use hermes or auto"
            )

    def check(self, use: ToolUse | None) -> None:
        """Raise RequestError if the model's calls can't be parsed."""
        if use is not None and self.tools is None:
            raise RequestError(
                "tools: the format of this model's calls is not known; the server needs --tool-call-parser, or send "
                'tool_choice "none"',
                param="tools",
            )

    def plan(
        self, prompt: str, conversation: Conversation, use: ToolUse | None, answer: StructuredOutputs | None,
        budget: int | None = None, separate_reasoning: bool = True,
    ) -> OutputPlan:  # fmt: skip
        """Return what constrains and parses the outputs after `prompt`.

        `answer` constrains the content; `budget` limits the reasoning, in tokens. Raises RequestError.
        """
        reasoning, tools = self.reasoning, self.tools
        if budget is not None and reasoning is None:
            raise RequestError(
                "thinking_token_budget is not supported: the model's reasoning has no known format; the server needs "
                "--reasoning-parser, or remove it",
                param="thinking_token_budget",
            )
        opened = None if reasoning is None else _opened(reasoning, prompt, conversation)
        before = None
        if reasoning is not None and opened is not False:
            before = Reasoning(reasoning.begin, reasoning.end, bool(opened), budget)
        if answer is not None and self._close_objects == "all":
            answer = answer.closed()
        constraint = constrained(
            tools, use, answer, before, self._specials.__contains__, closes_arguments=self._close_objects != "strict"
        )
        if use is None and (reasoning is None or not separate_reasoning):
            return OutputPlan(None, constraint)

        def make() -> ChatParser:
            return ChatParser(
                reasoning.splitter(bool(opened)) if reasoning is not None and separate_reasoning else None,
                None if use is None or tools is None else ToolCallParser(tools(use.functions), use.max_calls),
            )

        return OutputPlan(make, constraint)


def _opened(reasoning: ReasoningFormat, prompt: str, conversation: Conversation) -> bool | None:
    """Whether the output begins within the reasoning; None if it may open it, False if the prompt has closed it."""
    if conversation.continue_final_message:
        written = str(conversation.messages[-1].get("content") or "")
        begin, end = written.rfind(reasoning.begin), written.rfind(reasoning.end)
        return False if begin == end else begin > end
    opened = reasoning.opened_by(prompt)
    return True if opened is None and reasoning.always else opened
