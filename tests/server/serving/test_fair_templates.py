"""Templates of requests that loop: they hold up those of other clients for one of them at most."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE

CHAT = "/v1/chat/completions"
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
HARMLESS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
BODY = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("many\nother\n")
    with running(tiny_config(tiny_model, api_key_file=str(keys), trust_request_chat_template=True)) as handle:
        yield handle


async def test_ten_looping_templates_hold_up_others_for_one_of_them(server):
    """Each loops for 3 s. Neither another client nor another template of the same client waits for all of them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        over = 0

        async def ask(key, template):
            nonlocal over
            answer = await client.post(CHAT, json={**BODY, "chat_template": template}, headers={"X-Api-Key": key})
            before = over
            over += template is ENDLESS
            return answer.status_code, before

        attacks = [asyncio.create_task(ask("many", ENDLESS)) for _ in range(10)]
        await asyncio.sleep(0.5)
        answers = await asyncio.gather(*(ask(key, HARMLESS) for key in ("other", "many")))
        for one in attacks:
            one.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
    assert [status for status, _ in answers] == [200, 200]
    assert max(before for _, before in answers) <= 4, answers  # of ten
