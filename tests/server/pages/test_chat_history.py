"""Conversations that the browser keeps for the chat page: reopened, renamed, exported, deleted; and its limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.server.conftest import running, tiny_config
from tests.server.pages.conftest import NARROW
from tests.server.pages.test_chat import CALL, LONG, ask, finished, opened, says, setting

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def chat(open_page, server):
    return opened(open_page, server)


def titles(page):
    return page.locator("#chat-list .title")


def action(page, name, title):
    page.get_by_label(f"{name}: {title}", exact=True).click()


def talk(page, text, answer, number=1):
    setting(page, "extra", says(answer))
    ask(page, text)
    finished(page, number)


def exported(page, name, title):
    with page.expect_download() as download:
        action(page, name, title)
    return download.value.suggested_filename, Path(download.value.path()).read_text("utf-8")


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_a_conversation_survives_a_reload_and_goes_on(chat):
    talk(chat, "one", "It is red.")
    figures = chat.locator(".figures").text_content()
    chat.reload()
    expect(chat.locator(".user .text")).to_have_text("one")
    expect(chat.locator(".answer .text")).to_have_text("It is red.")
    expect(chat.locator(".figures")).to_have_text(figures)
    sent = []
    chat.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    talk(chat, "two", "And blue.", 2)
    assert [message["content"] for message in sent[-1]["messages"]] == ["one", "It is red.", "two"]
    expect(titles(chat)).to_have_text(["one"])


def test_conversations_are_listed_newest_first_and_opened_again(chat):
    talk(chat, "the first\nline two", "1")
    chat.locator("#new").click()
    expect(chat.locator("#welcome")).to_be_visible()
    talk(chat, "x" * 80, "2")
    expect(titles(chat)).to_have_text(["x" * 60 + "…", "the first"])
    expect(chat.locator("#chat-list .current .title")).to_have_text("x" * 60 + "…")
    titles(chat).last.click()
    expect(chat.locator(".answer .text")).to_have_text("1")
    expect(chat.locator("#chat-list .current .title")).to_have_text("the first")
    talk(chat, "more", "3", 2)
    expect(titles(chat)).to_have_text(["the first", "x" * 60 + "…"])


def test_a_new_tab_begins_a_new_conversation_and_lists_the_others(chat, server):
    talk(chat, "one", "1")
    other = chat.context.new_page()
    other.goto(chat.url)
    expect(titles(other)).to_have_text(["one"])
    expect(other.locator("#log > li")).to_have_count(0)


def test_an_answer_is_kept_up_to_where_it_was_interrupted(open_page, long_server):
    page = opened(open_page, long_server)
    setting(page, "extra", json.dumps(LONG))
    setting(page, "max_tokens", "3900")
    ask(page, "long")
    expect(page.locator(".answer .text")).not_to_be_empty()
    page.locator("#new").click()
    expect(page.locator("#log > li")).to_have_count(0)
    long_server.wait_idle()
    titles(page).click()
    expect(page.locator(".answer .text")).not_to_be_empty()
    expect(page.locator(".figures")).to_contain_text("stopped")
    setting(page, "extra", says("short"))
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .text")).to_have_text("short")


# ---- renaming, deleting, exporting -----------------------------------------------------------------------------------


def test_a_conversation_is_renamed_and_keeps_its_name(chat):
    talk(chat, "one", "1")
    action(chat, "Rename", "one")
    chat.locator("#title-input").fill("<b>Mine</b>")
    chat.keyboard.press("Enter")
    expect(titles(chat)).to_have_text("<b>Mine</b>")
    talk(chat, "two", "2", 2)
    expect(titles(chat)).to_have_text("<b>Mine</b>")
    action(chat, "Rename", "<b>Mine</b>")
    chat.locator("#title-input").fill("Other")
    chat.keyboard.press("Escape")
    expect(titles(chat)).to_have_text("<b>Mine</b>")
    chat.reload()
    expect(titles(chat)).to_have_text("<b>Mine</b>")


def test_a_deleted_conversation_is_gone_unless_it_is_undone(chat):
    talk(chat, "one", "1")
    action(chat, "Delete", "one")
    expect(titles(chat)).to_have_count(0)
    expect(chat.locator("#welcome")).to_be_visible()
    chat.get_by_role("button", name="Undo").click()
    titles(chat).click()
    expect(chat.locator(".answer .text")).to_have_text("1")
    action(chat, "Delete", "one")
    expect(titles(chat)).to_have_count(0)
    chat.reload()
    expect(chat.locator("#no-chats")).to_be_visible()


def test_a_conversation_is_exported_as_json_and_markdown(open_page, long_server):
    page = opened(open_page, long_server)
    setting(page, "system", "Be brief.")
    page.locator("summary", has_text="Tools").click()
    page.locator("#example-tools").click()
    [bracket] = long_server.answer("/tokenize", {"prompt": "<"})["tokens"]
    setting(page, "extra", says("I look.\n" + CALL, logit_bias={str(bracket): -100}))
    ask(page, "weather? / today")
    finished(page)
    setting(page, "tools", "")
    setting(page, "extra", says("It rains."))
    page.get_by_label("Result of get_weather").fill("```rain```")
    page.get_by_role("button", name="Send result").click()
    finished(page, 2)
    name, text = exported(page, "JSON", "weather? / today")
    found = json.loads(text)
    assert name == "weather today.json" and found["model"] == "tiny" and found["title"] == "weather? / today"
    system, question, called, result, answer = found["messages"]
    assert system == {"role": "system", "content": "Be brief."} and question["content"] == "weather? / today"
    assert result["tool_call_id"] == called["tool_calls"][0]["id"] and result["content"] == "```rain```"
    assert answer == {"role": "assistant", "content": "It rains."}
    long_server.answer("/v1/chat/completions", {"messages": found["messages"], "max_tokens": 1})
    name, text = exported(page, "Markdown", "weather? / today")
    assert name == "weather today.md"
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# weather? / today", "## System", "## User", "## Assistant", "## Result of get_weather",
                        "## Assistant"]  # fmt: skip
    assert "````\n```rain```\n````" in text and text.endswith("It rains.\n")


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_full_storage_is_named_and_the_conversation_goes_on(chat, server):
    quota = chat.context.new_cdp_session(chat)
    quota.send("Storage.overrideQuotaForOrigin", {"origin": server.url, "quotaSize": 1})
    talk(chat, "one", "1")
    expect(chat.locator("#notice")).to_contain_text("storage is full: export and delete chats")
    expect(titles(chat)).to_have_count(0)
    quota.send("Storage.overrideQuotaForOrigin", {"origin": server.url})
    talk(chat, "two", "2", 2)
    expect(titles(chat)).to_have_text(["one"])
    expect(chat.locator("#notice")).to_have_text("")


def test_a_browser_without_storage_is_named_and_chats(open_page, server):
    page = open_page("about:blank")
    page.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('denied', 'SecurityError'); }")
    page.goto(server.url + "/chat")
    expect(page.locator("#notice")).to_have_text("The browser does not keep chats: denied")
    talk(page, "one", "1")
    expect(page.locator(".answer .text")).to_have_text("1")


def test_keys_are_not_kept_with_conversations(chat):
    chat.locator("#key").fill("sk-secret")
    talk(chat, "one", "1")
    kept = chat.evaluate("""async () => {
        const { Store } = await import("/chat/store.js"), store = new Store();
        return JSON.stringify([await store.list(), await store.get((await store.list())[0].id)]);
    }""")
    assert "one" in kept and "sk-secret" not in kept


# ---- the server's state and the model's limits -----------------------------------------------------------------------


def test_the_page_shows_how_far_the_captures_are(open_page, server):
    ready = server.http.get("/ready").json()
    page = opened(open_page, server)
    expect(page.locator("#warmup")).to_be_hidden()
    ready["warm"] = {"mode": "background", "captured": 12, "pending": 33, "ratio": 0.3}
    page.route("**/ready", lambda route: route.fulfill(json=ready))
    page.reload()
    expect(page.locator("#warmup-text")).to_have_text("12 of 45 graphs captured")
    ready["warm"] |= {"captured": 45, "pending": 0}
    expect(page.locator("#warmup")).to_be_hidden()


@pytest.mark.parametrize(
    ("files", "missing"),
    [(("chat_template.jinja",), "no chat template"), (("chat_template.jinja", "tokenizer.json"), "no tokenizer")],
)
def test_a_model_that_cannot_chat_says_why(open_page, tiny_model, tmp_path, files, missing):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    for name in files:
        (folder / name).unlink()
    if "tokenizer.json" in files:
        (folder / "tokenizer_config.json").unlink()
    with running(tiny_config(folder)) as server:
        page = open_page(server.url + "/chat")
        expect(page.locator("#about")).to_contain_text(f"tiny has {missing}, so it can't chat")
        expect(page.locator("#examples")).to_be_hidden()
        ask(page, "hello")
        expect(page.locator(".error")).to_contain_text(missing)


def test_the_list_covers_a_narrow_screen_and_closes_when_a_chat_is_opened(open_page, server):
    page = opened(open_page, server, viewport=NARROW)
    expect(page.locator("#chats")).to_be_hidden()
    page.locator("#toggle").click()
    setting(page, "extra", says("1"))
    page.keyboard.press("Escape")
    ask(page, "one")
    finished(page)
    page.locator("#new").click()
    page.locator("#chats-toggle").click()
    expect(page.locator("#chats-close")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator("#chats-toggle")).to_be_focused()
    page.locator("#chats-toggle").click()
    titles(page).click()
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator(".answer .text")).to_have_text("1")
    assert not page.locator("#chat").evaluate("main => main.inert")
