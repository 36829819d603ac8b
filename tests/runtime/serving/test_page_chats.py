"""The list of chats, thoughts, formulas and continued answers of the web page in a real Chromium."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.chat_page import acts, chat_server, ended, messages, send
from support.served import serve

from mesh_transformer.data.tokens.tokenizer import Tokenizer

playwright = pytest.importorskip("playwright.sync_api")


def names(page: Any) -> list[str]:
    return page.locator("#chats option").all_inner_texts()


def shown(page: Any) -> str:
    return page.locator("#chats").evaluate("list => list.selectedOptions[0].textContent")


def test_chats_have_names_and_a_list(
    open_page: Any, new_browser: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    with chat_server(chat_tokenizer) as served:
        browser = new_browser()
        page = open_page(served.url, browser)
        assert names(page) == ["New chat"]
        send(page, "The first question")
        page.click("#new")
        assert messages(page) == []
        send(page, "Another one")
        assert names(page) == ["Another one", "The first question"]
        assert shown(page) == "Another one"
        page.select_option("#chats", label="The first question")
        assert messages(page) == ["The first question", answers[1]]
        # a name of its own
        page.click("#rename")
        playwright.expect(page.locator("#chat-name")).to_be_focused()
        page.keyboard.type("Sums")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#naming")).to_be_hidden()
        assert shown(page) == "Sums"
        page.click("#rename")
        page.keyboard.type("not kept")
        page.keyboard.press("Escape")
        assert shown(page) == "Sums"
        page.reload()
        playwright.expect(page.locator("#chat")).to_be_visible()
        assert (shown(page), messages(page)) == ("Sums", ["The first question", answers[1]])
        # a new tab begins with the newest
        assert sorted(names(open_page(served.url, browser))) == ["Another one", "Sums"]
        page.click("#remove")
        assert names(page) == ["Another one"]
        page.get_by_role("button", name="Undo").click()
        assert (shown(page), sorted(names(page))) == ("Sums", ["Another one", "Sums"])
        assert page.faults == []


def test_two_tabs_with_one_chat_lose_nothing(
    open_page: Any, new_browser: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    with chat_server(chat_tokenizer, context=1024) as served:
        browser = new_browser()
        first = open_page(served.url, browser)
        send(first, "Hello")
        second = open_page(served.url, browser)
        send(first, "From the first")
        send(second, "From the second")
        page = open_page(served.url, browser)
        assert names(page) == ["Hello (2)", "Hello"]
        texts = {}
        for name in names(page):
            page.select_option("#chats", label=name)
            texts[name] = messages(page)[2]
        assert texts == {"Hello": "From the first", "Hello (2)": "From the second"}
        assert messages(first)[2] == "From the first"


def test_chats_are_exported_and_imported(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str], tmp_path: Path
) -> None:
    """A file is one of `mesh-transformer prepare --instructions`."""
    with chat_server(chat_tokenizer) as served:
        page = open_page(served.url)
        send(page, "One")
        page.click("#new")
        send(page, "Two")
        with page.expect_download() as download:
            page.click("#export")
        assert download.value.suggested_filename == "chats.jsonl"
        download.value.save_as(tmp_path / "chats.jsonl")
        lines = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
        assert lines == [
            {
                "name": text,
                "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answers[1]}],
            }
            for text in ("Two", "One")
        ]
        page = open_page(served.url)
        page.set_input_files("#file", tmp_path / "chats.jsonl")
        playwright.expect(page.locator("#status")).to_have_text("2 of 2 chats are imported")
        assert sorted(names(page)) == ["One", "Two"]
        for content, words in {
            "{": "line 1: this is not JSON",
            '{"messages": [{"role": "user", "content": 3}]}': "line 1: expected messages",
            '{"messages": [{"role": "user", "content": "a"}]}\n[]': "line 2: expected messages",
        }.items():
            (tmp_path / "bad.jsonl").write_text(content)
            page.set_input_files("#file", tmp_path / "bad.jsonl")
            playwright.expect(page.locator("#status.bad")).to_contain_text("bad.jsonl, " + words)
        assert sorted(names(page)) == ["One", "Two"]
        assert page.faults == []


def test_a_full_store_says_so_and_loses_nothing(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str], tmp_path: Path
) -> None:
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        send(page, "One")
        page.evaluate(
            """() => {
                // the rest of the store, to the last character
                for (let size = 1 << 22; size >= 1; size >>= 1) {
                    try {
                        for (let i = 0; ; i++) localStorage.setItem("other" + size + "." + i, "x".repeat(size));
                    } catch {}
                }
            }"""
        )
        send(page, "Two")
        playwright.expect(page.locator("#kept")).to_contain_text("storage is full: what is new stays in this tab alone")
        shown_now = ["One", answers[1], "Two", answers[3]]
        assert messages(page) == shown_now
        page.reload()
        assert messages(page) == shown_now
        with page.expect_download() as download:
            page.click("#export")
        download.value.save_as(tmp_path / "chats.jsonl")
        (line,) = (tmp_path / "chats.jsonl").read_text().splitlines()
        assert [message["content"] for message in json.loads(line)["messages"]] == shown_now
        # what was kept before is still there
        kept = "JSON.parse(localStorage.getItem(Object.keys(localStorage).find(name => name.includes('chat.'))))"
        assert len(page.evaluate(kept)["messages"]) == 2
        page.evaluate(
            "Object.keys(localStorage).filter(n => n.startsWith('other')).forEach(n => localStorage.removeItem(n))"
        )
        page.click("#rename")
        page.keyboard.type("Named")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#kept")).to_contain_text("keeps the settings, the texts and the chats")
        assert len(page.evaluate(kept)["messages"]) == 4


def test_a_chat_of_an_earlier_page_stays(open_page: Any, new_browser: Any, chat_tokenizer: Tokenizer) -> None:
    with chat_server(chat_tokenizer) as served:
        browser = new_browser()
        browser.add_init_script(
            """if (!localStorage.getItem("begun")) {
                localStorage.setItem("begun", "1");
                const chat = [{ role: "user", content: "Old" }, { role: "assistant", content: "Yes" }];
                localStorage.setItem("mesh-transformer.chat", JSON.stringify(chat));
            }"""
        )
        page = open_page(served.url, browser)
        assert messages(page) == ["Old", "Yes"]
        assert names(page) == ["Old"]
        page.reload()
        assert names(page) == ["Old"]


THOUGHT = "<think>\nTwo and two\nare four.\n</think>\n\nFour."


@pytest.mark.parametrize("opened", [True, False], ids=["with both tags", "the template opens"])
def test_thoughts_are_folded_and_not_sent(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str], opened: bool
) -> None:
    answers[1] = THOUGHT if opened else THOUGHT.removeprefix("<think>\n")
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        send(page, "2 + 2?")
        assert messages(page) == ["2 + 2?", "Four."]
        thoughts = page.locator(".thoughts")
        playwright.expect(thoughts.locator("p")).to_be_hidden()
        thoughts.locator("summary").press("Enter")
        playwright.expect(thoughts.locator("p")).to_have_text("Two and two\nare four.", use_inner_text=True)
        page.fill("#message", "Sure?")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#send")
        assert asked.value.post_data_json["messages"][1] == {"role": "assistant", "content": "Four."}
        ended(page)
        # the editor has all of it
        acts(page, 1)["Edit"].click()
        assert page.input_value(".editing textarea") == answers[1]


def test_thoughts_without_an_end_are_shown_as_such(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    answers[1] = "<think>\n" + "so " * 40
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        page.fill("[name=max_tokens]", "30")
        page.fill("#message", "Hi")
        page.click("#send")
        playwright.expect(page.locator("#status")).to_contain_text("stopped at max tokens")
        playwright.expect(page.locator(".thoughts summary")).to_have_text("Thinking …")
        assert messages(page) == ["Hi", ""]


def test_an_answer_is_continued(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    answers[1] = "A long answer."
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        page.fill("[name=max_tokens]", "6")
        page.fill("#message", "Hi")
        page.click("#send")
        playwright.expect(page.locator("#status")).to_contain_text("stopped at max tokens")
        assert messages(page) == ["Hi", "A long"]
        with page.expect_request("**/v1/chat/completions") as asked:
            acts(page, 1)["Continue"].click()
        sent = asked.value.post_data_json
        assert sent["messages"][-1] == {"role": "assistant", "content": "A long"}
        assert (sent["add_generation_prompt"], sent["continue_final_message"]) == (False, True)
        playwright.expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
        # the fake model begins its answer again
        assert messages(page) == ["Hi", "A longA long"]
        assert page.locator("#messages article").count() == 2
        page.get_by_role("button", name="Undo").click()
        assert messages(page) == ["Hi", "A long"]
        served.engine.broken = True
        acts(page, 1)["Continue"].click()
        playwright.expect(page.locator("#status.bad")).to_contain_text("the model failed")
        assert messages(page) == ["Hi", "A long"]


FORMULAS = r"""The root of \(a^2 * b_1 * c_1\) and \[x_1 = \frac{a}{b}\] or $x_i * y_i$ costs $5 and $6.

\[
a
=
\href{javascript:window.hit=1}{b}
\]

$$
\sum_{i=1}^n *i*
$$

*But* \( stays, and \* is a star.
"""


def test_formulas_are_shown_as_they_are_written(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    answers[1] = FORMULAS
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        send(page, "Hi")
        content = page.locator("#messages .assistant .content")
        assert content.locator("em").all_inner_texts() == ["But"]
        assert content.locator("h1, h2, a").count() == 0
        lines = content.inner_text().replace("\n\n", "\n").splitlines()
        expected = FORMULAS.replace("*But*", "But").replace(r"\*", "*").replace("\n\n", "\n").splitlines()
        assert lines == expected


def test_each_control_has_a_name(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    """As a screen reader has them: no control without a name, and none of two messages with the same one."""
    answers[1] = "```\ncode\n```"
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        send(page, "One")
        acts(page, 0)["Edit"].click()
        for view in ("chat", "completions"):
            tree = page.locator("body").aria_snapshot()
            controls = re.findall(
                r"^\s*- (button|textbox|combobox|spinbutton|checkbox)( \"[^\"]*\")?", tree, re.MULTILINE
            )
            assert len(controls) > 10
            assert [kind for kind, name in controls if not name.strip()] == []
            own = [name for kind, name in controls if kind == "button"]
            assert len(set(own)) == len(own), (view, own)
            page.click("#other")
        # the parts of the chat
        page.keyboard.press("Escape")


def test_a_chat_by_keyboard_at_400_pixels(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    """Each control is reached by Tab, in the order of the page, and the page is no wider than the window."""
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url, viewport={"width": 400, "height": 740})
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        ended(page)
        page.keyboard.press("Shift+Tab")
        reached = []
        for _ in range(20):
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.act"))
            page.keyboard.press("Shift+Tab")
        back = ["regenerate", "delete", "edit", "copy", "messages", "import", "export", "remove", "rename", "chats"]
        places = [reached.index(name) for name in back]
        assert places == sorted(places), reached
        page.focus("#chats")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.keyboard.type("By keyboard")
        page.keyboard.press("Enter")
        assert shown(page) == "By keyboard"
        assert page.evaluate("document.activeElement.id") == "chats"
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.faults == []


def test_the_first_prompt_fits_the_model(open_page: Any) -> None:
    """Once upon a time and 64 tokens are too many for a context of 64."""
    with serve() as served:
        page = open_page(served.url)
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("tokens")
        assert page.locator("#status.bad").count() == 0
        assert page.locator("#text span[data-p]").count() > 0


def test_completions_go_on_when_the_context_is_full(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url)
        page.fill("#prompt", "é" + "abcdefgh" * 12)
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("the context is full (64 tokens)")
        page.get_by_role("button", name="Drop the beginning and go on").click()
        playwright.expect(page.locator("#status")).to_contain_text(re.compile(r"tokens?, "))
        assert page.input_value("#prompt") == "abcdefgh" * 4
        assert page.locator("#text .prompt").text_content() == "abcdefgh" * 4
        assert page.locator("#text span[data-p]").count() > 0
