"""A conversation to render with a chat template, and the preparation of its messages and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError

RESERVED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message chat_template tokenize return_dict "
    "return_tensors padding truncation max_length return_assistant_tokens_mask tokenizer_kwargs conversation".split()
)
"""Names that chat_template_kwargs can't set: they have their own fields, or aren't the template's."""

HINTS = frozenset(
    "enable_thinking thinking thinking_mode thinking_budget thinking_effort enable_reasoning reasoning "
    "reasoning_effort reasoning_mode low_effort preserve_thinking clear_thinking drop_thinking verbosity".split()
)
"""Variables of known templates that ask for more or less reasoning or text. Clients send them to every model."""

_TOOL_PROMPT = """\
You may call one or more functions. These are their signatures, as JSON:
<tools>
{tools}
</tools>
For each function call, write a JSON object with the function's name and arguments between these tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages and everything else that the text of a prompt depends on.

    Attributes:
        messages: Messages with role, content (text) and what else the template reads.
        tools: Tools in OpenAI's format: {"type": "function", "function": {…}}.
        variables: Further variables of the template, such as enable_thinking.
        documents: Documents for templates that read them.
        add_generation_prompt: End the text with the header of the assistant's message.
        continue_final_message: End the text within the last message, so that the output continues it.
        template: A template of the request's own.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Any] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None

    @property
    def num_chars(self) -> int:
        """Number of characters of all strings that the template may read, names of fields included."""
        total = 0
        unseen: list[Any] = [self.messages, self.tools, self.variables, self.documents]
        while unseen:
            value = unseen.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, dict):
                total += len("".join(value))
                unseen += value.values()
            elif isinstance(value, (list, tuple)):
                unseen += value
            elif isinstance(value, Mapping):  # last: slow for each number
                unseen.append(dict(value))
        return total

    def unread(self, template: str) -> list[str]:
        """Return the variables that the template doesn't read, without those that are false or null."""
        given = (name for name, value in self.variables.items() if value not in (None, False))
        return [name for name in given if not reads(template, name)]

    def check_against(self, template: str) -> None:
        """Raise RequestError for documents and variables that the template doesn't read, except hints."""
        for name in self.unread(template):
            if name not in HINTS:
                raise RequestError(
                    f"the model's chat template doesn't read {name!r}; remove it", param="chat_template_kwargs"
                )
        if self.documents and not reads(template, "documents"):
            raise RequestError("the model's chat template doesn't read documents; remove them", param="documents")

    def as_text(self, in_user: bool = False) -> list[dict[str, Any]]:
        """Return messages for a template that knows no tools: tools, calls and their results written as text.

        The format is Hermes'. Results become messages of the user, joined with the user's messages next to them, since
        many templates want user and assistant in turn. The tools are described in the system message; with `in_user`,
        for a template without one, in the first message of the user.
        """
        messages: list[dict[str, Any]] = []
        was_written = False
        for message in self.messages:
            plain, is_written = _plain(message), message["role"] == "tool" or bool(message.get("tool_calls"))
            if messages and messages[-1]["role"] == plain["role"] and (is_written or was_written):
                plain["content"] = "\n".join(filter(None, (messages.pop()["content"], plain["content"])))
                is_written = True
            messages.append(plain)
            was_written = is_written
        if not self.tools:
            return messages
        role = "user" if in_user else "system"
        first = next((one for one in messages[: None if in_user else 1] if one["role"] == role), None)
        if first is None:
            messages.insert(0, {"role": role, "content": self._described_tools})
        elif in_user:
            first["content"] = f"{self._described_tools}\n\n{first['content']}"
        else:
            first["content"] = f"{first['content']}\n\n{self._described_tools}"
        return messages

    def render_as_text(self, render: Callable[[list[dict[str, Any]]], str]) -> str:
        """Return what `render` makes of the messages of `as_text`.

        A template that refuses or drops a system message gets the description of the tools in the first message of the
        user. A system message of the request stays one. Raises what `render` raises: RequestError.
        """
        if not self.tools:
            return render(self.as_text())
        try:
            text: str | None = render(self.as_text())
        except RequestError:
            text = None
        if text is not None and self._described_tools in text:
            return text
        try:
            return render(self.as_text(in_user=True))
        except RequestError:
            if text is None:
                raise
            return text

    @property
    def _described_tools(self) -> str:
        functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.tools)
        return _TOOL_PROMPT.format(tools=functions)


def reads(template: str, name: str) -> bool:
    """Whether the source of a chat template mentions a variable."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls in its text; the result of a call as a message of the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls") or ()
    written = [
        json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}, ensure_ascii=False)
        for call in calls
    ]
    blocks = [f"<tool_call>\n{call}\n</tool_call>" for call in written]
    content = "\n".join([*([message["content"]] if message["content"] else []), *blocks])
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}
