"""The chat page in a real browser, against real servers: what a person types, sees, stops and gets told."""

from __future__ import annotations

import base64
import json
import re

import pytest

from tests.server.conftest import running, tiny_config
from tests.server.pages.conftest import NARROW

expect = pytest.importorskip("playwright.sync_api").expect

KEY = "sk-of-the-page"
LONG = {"ignore_eos": True}
GIF = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")  # one pixel
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def chat(open_page, server):
    """The page of the shared server, with the model's name known."""
    return opened(open_page, server)


def opened(open_page, server, **options):
    page = open_page(server.url + "/chat", **options)
    expect(page.locator("#name")).to_have_text("tiny")
    return page


def setting(page, name, value):
    """Fill an input of the settings, in a section that may be closed."""
    field = page.locator(f"#form [name={name}]")
    field.evaluate("input => { const part = input.closest('details'); if (part) part.open = true; }")
    field.fill(value)


def says(text, **fields):
    """Return the further fields of a request whose answer is `text`."""
    return json.dumps({"structured_outputs": {"choice": [text]}, "temperature": 0, **fields})


def ask(page, text="red"):
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def finished(page, number=1):
    """Wait for the figures of the answer with this number."""
    expect(page.locator(".figures")).to_have_count(number)


# ---- typing, streaming, stopping -----------------------------------------------------------------------------------


def test_enter_sends_the_message_and_the_answer_is_the_servers(chat, server):
    setting(chat, "temperature", "0")
    setting(chat, "max_tokens", "12")
    setting(chat, "extra", json.dumps(LONG))
    setting(chat, "system", "the old king")
    prompt = chat.locator("#prompt")
    prompt.press_sequentially("red")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("fox")
    expect(prompt).to_have_value("red\nfox")
    expect(chat.locator("#log > li")).to_have_count(0)
    prompt.press("Enter")
    finished(chat)
    expect(prompt).to_have_value("")
    assert chat.locator(".user .text").text_content() == "red\nfox"
    messages = [{"role": "system", "content": "the old king"}, {"role": "user", "content": "red\nfox"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **LONG}
    expected = server.answer("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert chat.locator(".answer .text").text_content() == expected
    figures = chat.locator(".figures").text_content()
    assert "to first token" in figures and "12 tokens" in figures and "token limit reached" in figures


def test_the_next_request_has_the_whole_conversation(chat):
    sent = []
    chat.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    setting(chat, "extra", says("It is red."))
    ask(chat, "one")
    finished(chat, 1)
    ask(chat, "two")
    finished(chat, 2)
    assert sent[1]["messages"] == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "It is red."},
        {"role": "user", "content": "two"},
    ]  # fmt: skip
    chat.locator("#new").click()
    expect(chat.locator("#log > li")).to_have_count(0)
    expect(chat.locator("#welcome")).to_be_visible()


def test_an_answer_grows_until_it_is_stopped_and_the_server_stops_too(open_page, long_server):
    page = opened(open_page, long_server)
    setting(page, "extra", json.dumps(LONG))
    setting(page, "max_tokens", "3900")
    ask(page)
    text = page.locator(".answer .text")
    # Looked at in the page: the answer may end before the test has read its text twice.
    page.wait_for_function("""() => {
        const length = document.querySelector(".answer .text")?.textContent.length ?? 0;
        window.firstLength ??= length >= 10 ? length : undefined;
        return length > window.firstLength;
    }""")
    before = page.evaluate("window.firstLength")
    expect(page.locator("#send")).to_be_hidden()
    page.locator("#stop").click()
    finished(page)
    expect(page.locator(".figures")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    long_server.wait_idle()
    kept = text.text_content()
    assert len(kept) >= before
    page.wait_for_timeout(200)
    assert text.text_content() == kept
    ask(page, "again")
    expect(page.locator(".answer")).to_have_count(2)
    page.keyboard.press("Escape")
    finished(page, 2)
    long_server.wait_idle()


def test_retry_replaces_the_last_answer(chat):
    setting(chat, "extra", says("first"))
    ask(chat)
    finished(chat)
    setting(chat, "extra", says("second"))
    chat.locator(".retry").click()
    expect(chat.locator(".answer .text")).to_have_text("second")
    expect(chat.locator(".user")).to_have_count(1)


def test_an_answer_tells_which_graphs_replayed(open_page, start_server):
    page = opened(open_page, start_server(graph_buckets=(2, 4), warmup="full"))
    setting(page, "max_tokens", "6")
    setting(page, "extra", json.dumps(LONG))
    ask(page)
    expect(page.locator(".figures")).to_contain_text("graph 2 × 5")
    expect(page.locator(".figures")).to_contain_text("1 prefill or eager")


# ---- token probabilities -------------------------------------------------------------------------------------------


def test_a_tokens_probabilities_show_on_hover_and_with_the_arrow_keys(chat, server):
    setting(chat, "temperature", "0")
    setting(chat, "max_tokens", "8")
    setting(chat, "extra", json.dumps(LONG | {"logit_bias": {str(id): 100 for id in plain_ids(server)}}))
    setting(chat, "top_logprobs", "3")
    chat.locator("#logprobs").check()
    ask(chat)
    finished(chat)
    tokens, popup = chat.locator(".token"), chat.locator("#popup")
    expect(tokens).to_have_count(8)
    expect(popup).to_be_hidden()
    tokens.nth(2).hover()
    expect(popup).to_be_visible()
    expect(popup.locator("tr")).to_have_count(3)
    expect(popup.locator(".chosen code")).to_have_text(tokens.nth(2).text_content().replace(" ", "␣"))
    assert re.fullmatch(r"[<>]?\d+(\.\d+)?%", popup.locator(".chosen .number").text_content())
    chat.locator("#prompt").hover()
    expect(popup).to_be_hidden()
    chat.locator(".answer .text").focus()
    chat.keyboard.press("ArrowRight")
    chat.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_have_class(re.compile("current"))
    expect(popup).to_be_visible()
    expect(chat.locator("#announcer")).to_contain_text("%")
    chat.keyboard.press("Escape")
    expect(popup).to_be_hidden()


def plain_ids(server):
    """Return ids of tokens that are whole ASCII words, so that every token has a text of its own."""
    words = ("the", "one", "red", "fox")
    return [server.answer("/tokenize", {"prompt": " " + word})["tokens"][-1] for word in words]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("ab c", ["ab", " c"])], [("ab", 1), (" c", 1)]),
        ([("", ["h"]), ("hé", ["�", "�"])], [("h", 1), ("é", 2)]),  # a character of two tokens
        ([("", ["</think>"]), ("so", ["so"])], [("so", 2)]),  # a token without text joins the next one
        ([("to", ["to", "p"]), ("p", [])], [("to", 1), ("p", 1)]),  # text held back for a stop string
        ([("x", [])], [("x", 0)]),
    ],
)
def test_text_is_assigned_to_its_tokens(chat, pieces, expected):
    found = chat.evaluate(
        """async pieces => {
            const { TokenRuns } = await import("/chat/tokens.js"), runs = new TokenRuns();
            const named = tokens => tokens.map(token => ({ token }));
            return pieces.flatMap(([text, tokens]) => runs.push(text, named(tokens)))
              .map(run => [run.text, run.tokens.length]);
        }""",
        pieces,
    )
    assert [tuple(one) for one in found] == expected


# ---- tools, schemas, reasoning, images -----------------------------------------------------------------------------


def test_a_tool_call_is_readable_and_takes_a_result(open_page, long_server):
    server, sent = long_server, []
    chat = opened(open_page, server)
    chat.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    chat.locator("summary", has_text="Tools").click()
    chat.locator("#example-tools").click()
    [bracket] = server.answer("/tokenize", {"prompt": "<"})["tokens"]
    setting(chat, "extra", says("I look.\n" + CALL, logit_bias={str(bracket): -100}))
    ask(chat, "weather?")
    finished(chat)
    call = chat.locator(".call")
    expect(call.locator("h3")).to_contain_text("get_weather")
    assert json.loads(call.locator("pre").text_content()) == {"city": "Paris"}
    assert chat.locator(".answer .text").text_content().strip() == "I look."
    setting(chat, "tools", "")
    setting(chat, "extra", says("It rains."))
    chat.get_by_label("Result of get_weather").fill("rain")
    chat.get_by_role("button", name="Send result").click()
    finished(chat, 2)
    expect(chat.locator(".answer .text").last).to_have_text("It rains.")
    *_, called, result = sent[-1]["messages"]
    assert result["role"] == "tool" and result["content"] == "rain"
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    expect(chat.get_by_role("button", name="Send result")).to_be_hidden()


def test_a_schema_constrains_the_answer(chat):
    chat.locator("summary", has_text="JSON schema").click()
    chat.locator("#example-schema").click()
    schema = json.loads(chat.locator("#response_format").input_value())
    schema["properties"] = {"name": {"enum": ["fox"]}, "year": {"enum": [7]}}
    setting(chat, "response_format", json.dumps(schema))
    ask(chat)
    finished(chat)
    assert json.loads(chat.locator(".answer .text").text_content()) == {"name": "fox", "year": 7}


def test_reasoning_is_collapsed_under_the_answer(open_page, tiny_model):
    with running(tiny_config(tiny_model, reasoning_parser="qwen3")) as server:
        page = opened(open_page, server)
        begun = [{"role": "assistant", "content": "I:"}]  # continued, so that nothing may precede the text
        text = "<think>\nhm, hm\n</think>\n\nyes"
        setting(page, "extra", says(text, messages=begun, continue_final_message=True))
        setting(page, "top_logprobs", "2")
        page.locator("#logprobs").check()
        ask(page)
        finished(page)
        expect(page.locator(".answer .body > .text")).to_have_text("yes")
        reasoning = page.locator("details.reasoning")
        expect(reasoning.locator(".text")).to_be_hidden()
        reasoning.locator("summary").click()
        expect(reasoning.locator(".text")).to_be_visible()
        expect(reasoning.locator(".text")).to_have_text("hm, hm")
        reasoning.locator(".token").first.hover()
        expect(page.locator("#popup")).to_be_visible()


def test_the_models_sampling_defaults_are_shown_and_not_sent(open_page, server):
    models = server.http.get("/v1/models").json()
    models["data"][0]["sampling_defaults"] = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 300}
    page = opened(open_page, server)
    expect(page.locator("#temperature")).to_have_attribute("placeholder", "1")
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    expect(page.locator("#defaults")).to_be_hidden()
    page.reload()
    expect(page.locator("#defaults")).to_be_visible()
    for name, value in (("temperature", "0.2"), ("top_p", "0.9"), ("max_tokens", "300"), ("min_p", "0")):
        expect(page.locator(f"#{name}")).to_have_attribute("placeholder", value)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    assert not {"temperature", "top_p", "max_tokens"} & set(sent.value.post_data_json)


def test_a_model_of_text_has_no_image_button_and_refuses_a_pasted_image(chat):
    expect(chat.locator("#attach")).to_be_hidden()
    chat.locator("#prompt").evaluate(
        """(prompt, bytes) => {
        const clipboardData = new DataTransfer();
        clipboardData.items.add(new File([new Uint8Array(bytes)], "dot.gif", { type: "image/gif" }));
        prompt.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
    }""",
        list(GIF),
    )
    expect(chat.locator("#notice")).to_have_text("tiny takes text only, no images.")


def test_images_are_attached_for_a_model_that_takes_them(open_page, server):
    """No model that is served takes images, so the list of models is changed on its way to the page."""
    models = server.http.get("/v1/models").json()
    models["data"][0]["input_modalities"] = ["text", "image"]
    page = opened(open_page, server)
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    expect(page.locator("#attach")).to_be_visible()
    picture = {"name": "dot.gif", "mimeType": "image/gif", "buffer": GIF}
    page.locator("#files").set_input_files([picture, picture])
    expect(page.locator("#images img")).to_have_count(2)
    page.get_by_label("Remove image 1").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is this?")
    [message] = sent.value.post_data_json["messages"]
    url = "data:image/gif;base64," + base64.b64encode(GIF).decode()
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}
    ]  # fmt: skip
    expect(page.locator(".user img")).to_be_visible()
    expect(page.locator("#images img")).to_have_count(0)


# ---- errors and keys -----------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_the_tab_only(open_page, start_server, tmp_path):
    (tmp_path / "keys").write_text(KEY)
    server = start_server(api_key_file=str(tmp_path / "keys"), wait_ready=False)
    server.wait(lambda: server.http.get("/ready").status_code == 200, "readiness")
    page = open_page(server.url + "/chat")
    expect(page.locator("#title")).to_have_text("An API key is needed")
    expect(page.locator("#key")).to_be_focused()
    page.locator("#key").fill("sk-wrong")
    page.locator("#key").press("Tab")
    expect(page.locator("#key-error")).to_contain_text("not accepted")
    ask(page)
    expect(page.locator(".error h3")).to_have_text("An API key is needed")
    page.locator("#key").fill(KEY)
    page.locator("#key").press("Tab")
    expect(page.locator("#name")).to_have_text("tiny")
    expect(page.locator("#key-error")).to_have_count(0)
    setting(page, "extra", says("Hello."))
    page.locator(".retry").click()
    expect(page.locator(".answer .text")).to_have_text("Hello.")
    stored = page.evaluate("() => [{ ...sessionStorage }, { ...localStorage }, document.cookie]")
    assert stored[0]["encore.chat.key"] == KEY and KEY not in stored[0]["encore.chat.settings"]
    assert stored[1:] == [{}, ""]
    page.reload()
    expect(page.locator("#name")).to_have_text("tiny")
    expect(page.locator("#key")).to_have_value(KEY)
    other = open_page(server.url + "/chat")
    expect(other.locator("#key")).to_have_value("")


def test_a_refused_field_is_marked(chat):
    setting(chat, "temperature", "200")
    ask(chat, "red fox")
    expect(chat.locator(".error h3")).to_have_text("The server refuses temperature")
    field = chat.locator("#temperature")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    expect(chat.locator("#temperature-error")).to_contain_text("100")
    setting(chat, "temperature", "1")
    expect(chat.locator("#temperature-error")).to_have_count(0)
    setting(chat, "extra", json.dumps({"min_tokens": -1}))
    chat.locator(".retry").click()
    expect(chat.locator("#extra-error")).to_contain_text("min_tokens")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tools", "[{", "not valid JSON"),
        ("tools", "{}", "list of tools"),
        ("extra", "[]", "an object"),
        ("top_k", "1.5", "whole number"),
    ],
)
def test_a_setting_that_cannot_be_sent_is_marked_and_nothing_is_lost(chat, name, value, message):
    setting(chat, name, value)
    ask(chat, "red fox")
    expect(chat.locator(f"#{name}-error")).to_contain_text(message)
    expect(chat.locator(f"#{name}")).to_be_focused()
    expect(chat.locator("#prompt")).to_have_value("red fox")
    expect(chat.locator("#log > li")).to_have_count(0)


def test_a_busy_server_is_named_and_the_failed_turn_is_left_out(open_page, start_server):
    server = start_server(max_num_seqs=1, max_waiting=0, max_model_len=4096)
    page, other = opened(open_page, server), opened(open_page, server)
    for one in (page, other):
        setting(one, "extra", json.dumps(LONG))
    ask(other, "long")
    expect(other.locator(".answer .text")).not_to_be_empty()
    ask(page, "too early")
    expect(page.locator(".error h3")).to_have_text("The server is busy")
    expect(page.locator(".error")).to_contain_text("Try again in 1 s.")
    other.keyboard.press("Escape")
    server.wait_idle()
    setting(page, "extra", says("Now."))
    ask(page, "later")
    expect(page.locator(".answer .text")).to_have_text("Now.")
    expect(page.locator(".user")).to_have_text("later")


def test_a_lost_server_is_named(open_page, tiny_model):
    with running(tiny_config(tiny_model)) as server:
        page = opened(open_page, server)
    ask(page)
    expect(page.locator(".error h3")).to_have_text("No connection")
    expect(page.locator(".retry")).to_be_visible()


def test_text_of_model_and_user_is_never_markup(open_page, start_server):
    evil = '<img src=x onerror="document.title=1"><b>x</b>'
    page = open_page(start_server(served_model_name=(evil,)).url + "/chat")
    expect(page.locator("#name")).to_have_text(evil)
    setting(page, "extra", says(evil))
    ask(page, evil)
    finished(page)
    assert page.locator(".user .text").text_content() == page.locator(".answer .text").text_content() == evil
    assert page.locator("img, b").count() == 0


# ---- layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_everything_without_scrolling_sideways(open_page, server, scheme):
    page = opened(open_page, server, viewport=NARROW, color_scheme=scheme)
    expect(page.locator("#settings")).to_be_hidden()
    toggle = page.locator("#toggle")
    toggle.press("Enter")
    expect(page.locator("#close")).to_be_focused()
    assert page.locator("#chat").evaluate("main => main.inert")
    setting(page, "extra", says("x" * 150))
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(toggle).to_be_focused()
    ask(page, "y" * 150)
    finished(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= NARROW["width"]
    for node in page.locator("main *:visible").all():
        box = node.bounding_box()
        assert box is None or box["x"] + box["width"] <= NARROW["width"] + 1, node.evaluate("n => n.outerHTML")
    light = sum(page.evaluate("() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"))
    assert (light > 600) == (scheme == "light")


def test_every_control_is_reachable_by_tab(chat):
    chat.locator("#prompt").focus()
    seen = set()
    for _ in range(80):
        chat.keyboard.press("Tab")
        seen.add(chat.evaluate("() => document.activeElement.id || document.activeElement.textContent"))
    shown = chat.locator(":is(button, input, select, textarea, summary, a):visible")
    names = {node.evaluate("node => node.id || node.textContent") for node in shown.all()}
    assert names <= seen
