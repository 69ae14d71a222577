"""A chat template that loops: it is interrupted, stalls nobody, and doesn't hold a shutdown."""

from __future__ import annotations

import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import CHAT_TEMPLATE, write_tiny_model
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of
from tests.server.http.test_half_closed import connect, request
from tests.server.workers import test_process
from tests.support.waiting import PATIENCE, wait

ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
RECURSIVE = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"
TEMPLATE = (
    f"{{% set last = messages[-1]['content'] %}}{{% if last == 'loop' %}}{ENDLESS}"
    f"{{% elif last == 'recurse' %}}{RECURSIVE}{{% elif last == 'divide' %}}{{{{ 1 // 0 }}}}{{% else %}}"
    f"{CHAT_TEMPLATE}{{% endif %}}"
)


def chat(content):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


@pytest.fixture(scope="module")
def looping_model(tmp_path_factory):
    """A folder with the tiny model, whose template loops for the message "loop"."""
    folder = tmp_path_factory.mktemp("looping")
    write_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(looping_model):
    with running(tiny_config(looping_model, template_seconds=1.0)) as handle:
        handle.answer("/v1/chat/completions", chat("red"))  # the first one compiles the template
        yield handle


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_loops_is_a_400(server, path):
    error = error_of(server.post(path, {"messages": chat("loop")["messages"]}), 400)
    assert error["param"] == "messages" and "--template-seconds" in error["message"]
    assert server.answer("/v1/chat/completions", chat("red"))
    server.wait_idle()


@pytest.mark.parametrize("content", ["recurse", "divide"])
def test_a_template_that_fails_is_a_400(server, content):
    error = error_of(server.post("/v1/chat/completions", chat(content)), 400)
    assert error["param"] == "messages" and "Error" in error["message"]


def test_others_are_served_while_a_template_loops(looping_model):
    """The template loops until its client leaves: whoever is answered did not wait for it."""
    with running(tiny_config(looping_model, template_seconds=3600)) as server:
        server.answer("/v1/chat/completions", chat("red"))
        with connect(server) as attacker:
            attacker.sendall(request(chat("loop"), "/v1/chat/completions"))
            server.wait(loops, "the loop")
            for _ in range(5):
                assert server.http.get("/health").status_code == 200
                assert server.answer("/v1/chat/completions", chat("red"))
            assert loops()
        server.wait(lambda: not loops(), "its end")
        server.wait_idle()


def loops():
    return any(one.name == "text" for one in threading.enumerate())


def test_a_client_that_leaves_ends_the_template(server):
    for _ in range(4):  # more than the threads of a lane
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/chat/completions", json=chat("loop"), timeout=0.1)
    server.wait(lambda: not loops(), "the end of the threads")
    assert server.answer("/v1/chat/completions", chat("red"))


start = test_process.start


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_ends_a_server_whose_template_loops(looping_model, start, workers):
    process, url = test_process.started(
        start, looping_model, "--template-seconds", "3600", "--drain-seconds", "0.5", "--http-workers", workers
    )
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(lambda: httpx.post(url + "/v1/chat/completions", json=chat("loop"), timeout=3600))
        wait(lambda: "encore_num_requests_in_flight 1" in httpx.get(url + "/metrics").text, "the request")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
        answer = attack.result()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
    assert process.returncode == 0, log
    assert "Traceback" not in log
