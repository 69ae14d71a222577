"""Which tool-call and reasoning formats a model uses, from its chat template or by name."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigError
from engine.text.parsing.formats import Format
from engine.text.parsing.harmony import HARMONY_REASONING, Harmony
from engine.text.parsing.json_formats import Hermes, Llama3Json, Mistral
from engine.text.parsing.pythonic import Pythonic
from engine.text.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from engine.text.parsing.xml_format import Qwen3Coder
from graph_cache.utils.validation import did_you_mean

TOOL_FORMATS: Mapping[str, type[Format]] = {
    one.name: one for one in (Hermes, Llama3Json, Pythonic, Mistral, Qwen3Coder, Harmony)
}
REASONING: Mapping[str, ReasoningFormat] = {**REASONING_FORMATS, HARMONY_REASONING.name: HARMONY_REASONING}
# Names that vLLM and SGLang give to the same formats.
TOOL_ALIASES = {
    "openai": "harmony", "gpt-oss": "harmony",
    "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}  # fmt: skip
REASONING_ALIASES = {
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
    "deepseek-r1": "deepseek_r1",
    "qwen3-thinking": "deepseek_r1",
}
MARKERS = frozenset(
    marker for one in TOOL_FORMATS.values() for marker in (*one.openers, *one.closers, *one.inner_markers)
) | frozenset(marker for one in REASONING.values() for marker in (one.begin, one.end))
"""Texts of the tokens that mark tool calls and reasoning, in any format."""
AUTO, NONE = "auto", "none"


def tool_format(name: str, template: str | None) -> type[Format] | None:
    """Return a tool-call format by name; `auto` chooses by the template, `none` is no format. Raises ConfigError."""
    if name == AUTO:
        return _tool_format_of(template or "")
    if name == NONE:
        return None
    name = TOOL_ALIASES.get(name, name)
    if name not in TOOL_FORMATS:
        raise ConfigError(_unknown("tool_call_parser", name, [*TOOL_FORMATS, *TOOL_ALIASES]))
    return TOOL_FORMATS[name]


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return a reasoning format by name; `auto` chooses by the template, `none` is no format. Raises ConfigError."""
    if name == AUTO:
        return _reasoning_format_of(template or "")
    if name == NONE:
        return None
    name = REASONING_ALIASES.get(name, name)
    if name not in REASONING:
        raise ConfigError(_unknown("reasoning_parser", name, [*REASONING, *REASONING_ALIASES]))
    return REASONING[name]


def _tool_format_of(template: str) -> type[Format] | None:
    if _is_harmony(template):
        return Harmony
    if "<function=" in template and "<parameter=" in template:
        return Qwen3Coder
    if "[TOOL_CALLS]" in template:
        return Mistral
    if "<tool_call>" in template:
        return Hermes
    if "<|python_start|>" in template or "[func_name1(" in template:
        return Pythonic
    if "<|python_tag|>" in template or '{"name": function name' in template:
        return Llama3Json
    return None


def _reasoning_format_of(template: str) -> ReasoningFormat | None:
    if _is_harmony(template):
        return HARMONY_REASONING
    if "[THINK]" in template:
        return REASONING_FORMATS["mistral"]
    if "<think>" in template or "</think>" in template:
        return REASONING_FORMATS["qwen3" if "enable_thinking" in template else "deepseek_r1"]
    return None


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def _unknown(setting: str, name: str, known: list[str]) -> str:
    near = did_you_mean(name, known) or f"; known: {', '.join(known)}"
    return f"{setting}={name!r} is unknown{near}; auto chooses by the chat template, none turns it off"
