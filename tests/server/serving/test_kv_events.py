"""KV events of a server whose engine is a separate process, from requests over HTTP."""

from __future__ import annotations

import pytest

from tests.server.conftest import running, tiny_config
from tests.support.kv_subscriber import Subscriber

PROMPT = [5, 9, 20, 31, 7, 11, 13, 17] * 5


@pytest.mark.parametrize("in_process", [True, False])
def test_a_router_sees_prompts_of_the_server(tiny_model, tmp_path, in_process):
    events = {
        "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events", "topic": "kv@pod@tiny",
        "replay_endpoint": f"ipc://{tmp_path}/replays",
    }  # fmt: skip
    with running(tiny_config(tiny_model, kv_events_config=events, in_process=in_process)) as server:
        router = Subscriber(events["endpoint"], "kv@", events["replay_endpoint"])
        try:
            server.answer("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True})
            router.receive_until(lambda: router.view.match([*PROMPT, 1, 1, 1, 1, 1, 1, 1, 1, 1], 16) == 2)
            assert router.view.match([6, *PROMPT], 16) == 0
            replayed = router.replay()
            router.receive_until(lambda: router.next >= len(replayed))
            assert len(replayed) == router.next >= 1
        finally:
            router.close()
