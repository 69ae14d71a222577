"""Render a chat template that came with a request, in a separate process with limits on time and memory.

A template is a program: a sandbox keeps it from Python's objects, but not from loops or huge strings. This file is run
as a script, so it imports the standard library and jinja2 only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SECONDS = 3  # of processor time
HANG_SECONDS = 60  # a template never waits, but a busy machine lets its process wait, from Python's start on
BYTES = 512 * 1024 * 1024
MAX_CHARS = 8 * 1024 * 1024


class TemplateFailed(Exception):
    """The template is invalid, raised an error, or exceeded a limit."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the rendered text. Takes about 0.2 s. Raises TemplateFailed."""
    job = json.dumps({"template": template, "variables": variables})
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__], input=job.encode(), capture_output=True, timeout=HANG_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateFailed(f"it exceeds {SECONDS} s") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:  # killed by a limit
        raise TemplateFailed(f"it exceeds {SECONDS} s or {BYTES >> 20} MiB") from error
    if "error" in answer:
        raise TemplateFailed(answer["error"])
    return answer["text"]


def _render_job(job: Mapping[str, Any]) -> dict[str, str]:
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Read `{% generation %}…{% endgeneration %}`, with which training templates mark answers, as its content."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Parser) -> Scope:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # transformers' filter: its options, in its order
    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        text = environment.from_string(job["template"]).render(**job["variables"])
    except MemoryError:
        return {"error": f"it exceeds {BYTES >> 20} MiB"}
    except Exception as error:  # a template raises whatever its expressions raise
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    if len(text) > MAX_CHARS:
        return {"error": f"its text has {len(text)} characters; at most {MAX_CHARS} are allowed"}
    return {"text": text}


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    json.dump(_render_job(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    _main()
