"""Chat templates of requests: the same text as transformers renders."""

from __future__ import annotations

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
