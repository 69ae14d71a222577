"""Chat templates of requests: the same text as transformers renders, and what their limit of time counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.text.request_template import TemplateFailed, render

MESSAGES = [
    {"role": "user", "content": "hé <b>\"&'"},
    {
        "role": "assistant",
        "content": "y",
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": [1], "a": "é"}}}],
    },
]
PARTS = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ messages[0] | tojson(ensure_ascii=True) }}",
    "{{ messages[1] | tojson(separators=(',', ':'), sort_keys=True) }}",
    "{{ messages[0] | tojson(true, 1) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "  {% if true %}\n x\n  {% endif %}\n{{ bos_token }}{{ missing }}{{ strftime_now('%Y') }}",
    "{% set ns = namespace(n=0) %}{% generation %}{% set ns.n = 3 %}{% endgeneration %}{{ ns.n }}",
]


def test_templates_render_as_in_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "\n|".join(PARTS)
    [[wanted], _] = render_jinja_template([MESSAGES], chat_template=template, bos_token="<s>")
    assert render(template, {"messages": MESSAGES, "bos_token": "<s>"}) == wanted


@pytest.mark.parametrize(
    "template", ["{{ messages | tojson(colour=1) }}", "{% generation %}", "{{ raise_exception('no') }}"]
)
def test_what_transformers_refuses_is_refused(template: str) -> None:
    with pytest.raises(TemplateFailed):
        render(template, {"messages": MESSAGES})


def test_a_process_that_waits_for_the_processor_is_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "python"
    late.write_text(f'#!/bin/sh\nsleep 6\nexec {sys.executable} "$@"\n')
    late.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(late))
    assert render("{{ word }}", {"word": "red"}) == "red"


def test_a_loop_is_ended_by_its_processor_time() -> None:
    endless = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(TemplateFailed, match="exceeds 3 s"):
        render(endless, {})
