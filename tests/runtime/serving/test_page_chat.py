"""The chat of the web page in a real Chromium, against a server with a fake engine."""

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
from support.chat_page import acts, chat_server, ended, messages, send
from support.chat_templates import CHATML, chat_folder
from support.served import KEY, serve
from support.waiting import until

from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer

playwright = pytest.importorskip("playwright.sync_api")


def test_a_chat(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    with chat_server(chat_tokenizer) as served:
        page = open_page(served.url)
        playwright.expect(page.locator("#title")).to_have_text("Chat")
        assert page.evaluate("document.activeElement.id") == "message"
        page.keyboard.type("What is <i>2 + 2</i>?")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#status")).to_contain_text("tokens")
        assert messages(page) == ["What is <i>2 + 2</i>?", answers[1]]
        assert page.input_value("#message") == ""
        page.fill("#message", "And now?")
        page.click("#send")
        playwright.expect(page.locator("#messages .content")).to_have_count(4)
        playwright.expect(page.locator("#messages .content").last).to_have_text(answers[3])
        page.reload()
        assert messages(page) == ["What is <i>2 + 2</i>?", answers[1], "And now?", answers[3]]
        page.click("#new")
        assert messages(page) == []
        assert page.locator("#messages :is(i, b)").count() == 0
        assert all(url.startswith((served.url, "data:")) for url in page.requests), page.requests
        assert page.faults == []


def test_a_chat_has_a_system_message_and_the_sampling_options(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    answers[:] = ["", "", "with a system message"]
    with chat_server(chat_tokenizer) as served:
        page = open_page(served.url)
        page.fill("[name=system]", "Be short.")
        page.fill("[name=max_tokens]", "4")
        page.fill("#message", "Hi")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#send")
        sent = asked.value.post_data_json
        assert sent["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        assert (sent["max_tokens"], sent["temperature"], sent["model"]) == (4, 0.8, "tiny")
        playwright.expect(page.locator("#messages .content").last).to_have_text("with")


def test_stop_keeps_the_part_of_an_answer(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    answers[1] = "a long answer\n" * 30
    with chat_server(chat_tokenizer, delay=0.05) as served:
        page = open_page(served.url)
        page.fill("#message", "Hi")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#messages .assistant .content")).to_contain_text("a long")
        page.click("#halt")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        until(lambda: served.metric("requests_running") == 0)
        shown = messages(page)[1]
        assert answers[1].startswith(shown)
        assert len(shown) < len(answers[1])
        assert page.locator("#send").is_enabled()


def test_a_message_that_the_template_refuses_returns_to_its_field(
    open_page: Any, tmp_path: Path, answers: list[str]
) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('One message only') }}{% endif %}" + CHATML
    with chat_server(load_tokenizer(str(chat_folder(tmp_path, template)))) as served:
        page = open_page(served.url)
        for text in ("One", "Two"):
            playwright.expect(page.locator("#send")).to_be_enabled()
            page.fill("#message", text)
            page.click("#send")
        playwright.expect(page.locator("#status")).to_contain_text("One message only")
        assert page.locator("#status.bad").count() == 1
        assert messages(page) == ["One", answers[1]]
        assert page.input_value("#message") == "Two"


def test_a_model_with_a_template_completes_texts_too(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    answers[:] = [""] * 3 + ["unused"]
    with chat_server(chat_tokenizer) as served:
        page = open_page(served.url)
        page.click("#other")
        playwright.expect(page.locator("#title")).to_have_text("Completions")
        assert page.input_value("[name=max_tokens]") == "64"
        assert not page.locator("#message").is_visible()
        page.reload()
        playwright.expect(page.locator("#other")).to_have_text("Chat")
        assert page.locator("#prompt").is_visible()
        page.click("#other")
        assert page.locator("#message").is_visible()
    with serve() as plain:
        page = open_page(plain.url)
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        assert page.locator("#other").is_hidden()
        assert page.locator("#prompt").is_visible()


def test_a_key_shows_the_chat(open_page: Any, chat_tokenizer: Tokenizer) -> None:
    with chat_server(chat_tokenizer, keys=[KEY]) as served:
        page = open_page(served.url)
        playwright.expect(page.locator("#access-note")).to_contain_text("API key")
        page.fill("[name=key]", KEY)
        page.keyboard.press("Tab")
        playwright.expect(page.locator("#message")).to_be_focused()
        playwright.expect(page.locator("#status")).to_have_text("")


def test_a_chat_fits_a_phone(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    with chat_server(chat_tokenizer, context=2048) as served:
        page = open_page(served.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        page.fill("#message", "x" * 100)
        page.focus("#message")
        page.keyboard.press("Tab")
        playwright.expect(page.locator("#send")).to_be_focused()
        page.tap("#send")
        playwright.expect(page.locator("#messages .assistant .content")).to_have_text(answers[1], use_inner_text=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.locator("#send").bounding_box()["height"] >= 40
        # wide code, a wide table and a long word scroll by themselves, or break
        wide = f"```\n{'code ' * 40}\n```\n\n|{'head|' * 15}\n|{'-|' * 15}\n\n{'w' * 100}\n\n"
        answers[3] = wide + "line\n" * 60
        page.fill("#message", "More")
        page.tap("#send")
        playwright.expect(page.locator("#status")).to_contain_text("the answer is complete")
        playwright.expect(page.locator("#messages .content")).to_have_count(4)
        below = page.evaluate(
            "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.querySelector('#messages'))"
        )
        assert below < 2
        assert page.locator("#messages").bounding_box()["height"] < 740
        assert page.locator("#messages table").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("(log => log.scrollWidth - log.clientWidth)(document.querySelector('#messages'))") == 0


def test_the_chat_survives_the_tab(
    open_page: Any, new_browser: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    """A new tab begins with the newest chat, and does not change the other tab's."""
    with chat_server(chat_tokenizer) as served:
        browser = new_browser()
        first = open_page(served.url, browser)
        first.fill("[name=system]", "")
        send(first, "Hello")
        first.fill("#message", "a draft")
        first.close()
        page, other = open_page(served.url, browser), open_page(served.url, browser)
        for tab in (page, other):
            assert messages(tab) == ["Hello", answers[1]]
            assert tab.input_value("#message") == "a draft"
        other.click("#new")
        assert messages(other) == []
        page.reload()
        assert messages(page) == ["Hello", answers[1]]
        other.get_by_role("button", name="Undo").click()
        assert messages(other) == ["Hello", answers[1]]
        page.fill("[name=system]", "Be kind.")
        page.close()
        assert open_page(served.url, browser).input_value("[name=system]") == "Be kind."


def test_max_tokens_of_one_mode_stay_there(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    with chat_server(chat_tokenizer) as served:
        page = open_page(served.url)
        page.click("#other")
        page.fill("[name=max_tokens]", "5")
        page.click("#other")
        assert page.input_value("[name=max_tokens]") == ""
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, "Hi")
        assert "max_tokens" not in asked.value.post_data_json
        page.fill("[name=max_tokens]", "300")
        page.click("#other")
        assert page.input_value("[name=max_tokens]") == "5"
        page.reload()
        playwright.expect(page.locator("#other")).to_have_text("Chat")
        assert page.input_value("[name=max_tokens]") == "5"
        page.click("#other")
        assert page.input_value("[name=max_tokens]") == "300"


def test_regenerate_edit_and_delete(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    with chat_server(chat_tokenizer, context=1024) as served:
        page = open_page(served.url)
        send(page, "One")
        send(page, "Two")
        old = messages(page)
        assert list(acts(page, 1)) == ["Copy", "Edit", "Delete"]
        # the last answer again; the reader can return to the old one
        answers[3] = "Another second answer."
        acts(page, 3)["Regenerate"].click()
        playwright.expect(page.locator("#messages .content").last).to_have_text(answers[3])
        ended(page)
        page.get_by_role("button", name="Undo").click()
        assert messages(page) == old
        # a message of the user is changed, and answered again
        acts(page, 0)["Edit"].click()
        playwright.expect(page.locator(".editing textarea")).to_be_focused()
        page.keyboard.type("First ")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.get_by_role("button", name="Save and ask again").click()
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "OneFirst "}]
        ended(page)
        assert messages(page) == ["OneFirst ", answers[1]]
        page.get_by_role("button", name="Undo").click()
        assert messages(page) == old
        # only the text is changed
        acts(page, 1)["Edit"].click()
        page.fill(".editing textarea", "My own *answer*")
        page.keyboard.press("Control+Enter")
        assert messages(page) == ["One", "My own answer", *old[2:]]
        acts(page, 2)["Edit"].click()
        page.keyboard.type("nothing")
        page.keyboard.press("Escape")
        assert messages(page) == ["One", "My own answer", *old[2:]]
        acts(page, 3)["Delete"].click()
        assert messages(page) == ["One", "My own answer", "Two"]
        page.get_by_role("button", name="Undo").click()
        assert len(messages(page)) == 4
        acts(page, 3)["Delete"].click()
        with page.expect_request("**/v1/chat/completions") as asked:
            acts(page, 2)["Answer"].click()
        assert [message["content"] for message in asked.value.post_data_json["messages"]] == [
            "One",
            "My own *answer*",
            "Two",
        ]
        ended(page)
        page.reload()
        assert messages(page) == ["One", "My own answer", "Two", answers[3]]
        # a failure gives the old answer back
        served.engine.broken = True
        acts(page, 3)["Regenerate"].click()
        playwright.expect(page.locator("#status.bad")).to_contain_text("the model failed")
        assert messages(page)[3] == answers[3]


def test_a_full_chat_drops_its_oldest_messages(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    """In a context of 500 tokens, 4 turns of 64 and a message of 269 have too many; one turn leaves a quarter free."""
    answers[:] = ["c" * 40] * 10
    turns = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "a" * 40}] * 4
    old = [turn["content"] for turn in turns]
    with chat_server(chat_tokenizer, context=500) as served:
        page = open_page(served.url)
        page.evaluate("chat => sessionStorage.setItem('mesh-transformer.chat', JSON.stringify(chat))", turns)
        page.reload()
        assert messages(page) == old
        page.fill("#message", "x" * 250)
        page.click("#send")
        playwright.expect(page.locator("#status.bad")).to_contain_text("500")
        # nothing is lost
        assert page.input_value("#message") == "x" * 250
        assert messages(page) == old
        page.get_by_role("button", name="Drop the oldest messages").click()
        ended(page)
        assert messages(page) == [*old, "x" * 250, "c" * 40]
        assert page.locator("article.dropped .content").all_inner_texts() == old[:6]
        page.fill("#message", "Last")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#send")
        sent = asked.value.post_data_json["messages"]
        assert [message["content"] for message in sent] == [*old[6:], "x" * 250, "c" * 40, "Last"]
        ended(page)
        page.reload()
        assert page.locator("article.dropped").count() == 6
        # one message that is too long needs another answer
        page.fill("#message", "y" * 600)
        page.click("#send")
        page.get_by_role("button", name="Drop the oldest messages").click()
        playwright.expect(page.locator("#status.bad")).to_contain_text("the last message alone is too long")
        assert page.input_value("#message") == "y" * 600
        page.click("#send")
        page.get_by_role("button", name="New chat").last.click()
        assert messages(page) == []
        assert page.input_value("#message") == "y" * 600
        page.click("#send")
        playwright.expect(page.locator("#status.bad")).to_contain_text("500")
        assert page.locator("#offers").is_hidden()


def test_an_answer_that_fills_the_context_can_be_made_again(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]
) -> None:
    answers[:] = ["", "a" * 60, "", "b" * 200]
    with chat_server(chat_tokenizer, context=256) as served:
        page = open_page(served.url)
        send(page, "One")
        page.fill("#message", "Two")
        page.click("#send")
        playwright.expect(page.locator("#status")).to_contain_text("stopped at the end of the context (256 tokens)")
        cut = messages(page)[3]
        assert cut == "b" * 150
        answers[1] = "b" * 200
        page.get_by_role("button", name="Drop the oldest messages and answer again").click()
        ended(page)
        assert messages(page) == ["One", "a" * 60, "Two", "b" * 200]
        page.get_by_role("button", name="Undo").click()
        assert messages(page)[3] == cut


MARKDOWN = """# Title
A **bold** word, `code` and a [link](https://example.org/a?b=c&d).
Next line

- [x] done
- one

| a | b |
|---|--:|
| 1 | 2 |

```python
if a < b:
    print("<b>&amp;</b>")
```

![a picture](https://example.org/a.png)
"""


@pytest.mark.parametrize("clipboard", [True, False], ids=["https", "http"])
def test_markdown_and_its_copy_buttons(
    open_page: Any, new_browser: Any, chat_tokenizer: Tokenizer, answers: list[str], clipboard: bool
) -> None:
    """Copying also works without the clipboard's interface, which a page of plain HTTP does not have."""
    answers[1] = MARKDOWN
    with chat_server(chat_tokenizer, context=1024) as served:
        browser = new_browser(permissions=["clipboard-read", "clipboard-write"])
        if not clipboard:
            browser.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page = open_page(served.url, browser)
        send(page, "Hi")
        answer = page.locator("#messages .assistant .content")
        for element, text in {
            "h1": "Title",
            "strong": "bold",
            "p code": "code",
            "td[align=right]": "2",
            ".code .bar span": "python",
        }.items():
            playwright.expect(answer.locator(element)).to_have_text(text)
        assert answer.locator("li").all_inner_texts() == ["☑ done", "one"]
        assert answer.locator("p").first.inner_text() == "A bold word, code and a link.\nNext line"
        link = answer.locator("a").first
        assert link.get_attribute("href") == "https://example.org/a?b=c&d"
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        # a picture is a link: it loads nothing
        assert answer.locator("a").last.inner_text() == "a picture"
        code = 'if a < b:\n    print("<b>&amp;</b>")'
        assert answer.locator("pre").inner_text().rstrip() == code
        for button, copied in ((answer.locator(".copy-code"), code), (page.locator("[data-act=copy]").last, MARKDOWN)):
            button.click()
            playwright.expect(button).to_have_text("Copied")
            page.fill("#message", "")
            page.focus("#message")
            page.keyboard.press("Control+V")
            assert page.input_value("#message").rstrip() == copied.rstrip()
        assert page.faults == []


def hostile(port: int) -> str:
    """An answer that tries to run a script, to load something and to leave its place. PORT listens."""
    return """<script>window.hit = 1</script><script src="http://127.0.0.1:PORT/a.js"></script>

<img src="http://127.0.0.1:PORT/a.png" onerror="window.hit = 2"> <img src=x onerror=window.hit=3>

![a](http://127.0.0.1:PORT/b.png "t") ![a](javascript:window.hit=4) ![x" \
onerror="window.hit=5](http://127.0.0.1:PORT/c.png" onerror="window.hit=5)

[a](javascript:window.hit=6) [b](JaVaScRiPt&colon;window.hit=7) [c](&#106;avascript:window.hit=8) \
[d](data:text/html,<script>window.hit=9</script>) [e](vbscript:a) [f](\tjavascript:window.hit=10) \
[g](//127.0.0.1:PORT/g) [h](/metrics) [i](<javascript:window.hit=11>) <javascript:window.hit=12>

[ref] and ![ref]

[ref]: javascript:window.hit=13 "onmouseover=window.hit=14"

<svg onload="window.hit=15"><use href="http://127.0.0.1:PORT/s.svg#a"/><animate onbegin=window.hit=16 /></svg>
<math><mtext><table><mglyph><style><img src=x onerror=window.hit=17></style></mglyph></table></mtext></math>

<iframe src="http://127.0.0.1:PORT/f"></iframe><iframe srcdoc="<script>parent.hit=18</script>"></iframe>
<style>@import url(http://127.0.0.1:PORT/s.css); body { display: none }</style>
<link rel="stylesheet" href="http://127.0.0.1:PORT/l.css"><link rel="preconnect" href="http://127.0.0.1:PORT">
<form action="http://127.0.0.1:PORT/post"><input name="key" autofocus \
onfocus="window.hit=19"><button>Send</button></form>
<object data="http://127.0.0.1:PORT/o"></object><embed src="http://127.0.0.1:PORT/e"><video \
src="http://127.0.0.1:PORT/v" autoplay></video>
<base href="http://127.0.0.1:PORT/"><meta http-equiv="refresh" content="0; url=http://127.0.0.1:PORT/m">
<details open ontoggle="window.hit=20"><p style="position: fixed; inset: 0; \
background: url(http://127.0.0.1:PORT/b)">a</p>

```" onmouseover="window.hit=21"><img/src=x/onerror=window.hit=22>
</code></pre><script>window.hit = 23</script>
```

`<img src=x onerror=window.hit=24>` **<img src=x onerror=window.hit=25>** | a |

|<img src=x onerror=window.hit=26>|[a](javascript:window.hit=27)|
|:--|--:|
|<script>window.hit=28</script>|![a](http://127.0.0.1:PORT/t.png)|

\\(\\href{javascript:window.hit=30}{x}\\) \\[\\includegraphics{http://127.0.0.1:PORT/f.png}\\] \
$\\htmlClass{a" onclick="window.hit=31}{y}$ \\(<img src=x onerror=window.hit=32>\\)

$$\\def\\a{\\a\\a}\\a <img src=http://127.0.0.1:PORT/g.png onerror=window.hit=33>$$

\\[
<script>window.hit=34</script><a href="javascript:window.hit=35">z</a>

1. <a href="http://127.0.0.1:PORT/p" ping="http://127.0.0.1:PORT/ping" download id="send" name="controls">x</a>
""".replace("PORT", str(port))


UNSAFE = """() => [...document.querySelectorAll("#messages .content *")].filter(element =>
    !"p br hr h1 h2 h3 strong em del code pre blockquote ul ol li table thead tbody tr th td a div span button"
        .split(" ").includes(element.localName)
    || [...element.attributes].some(({ name, value }) => /^on|style|src|id$|^name|ping|download/.test(name)
        || (name === "href" && !/^(https?|mailto):/.test(value)))
).map(element => element.outerHTML)"""


@pytest.mark.parametrize("bypass_csp", [False, True], ids=["policy", "no policy"])
def test_nothing_in_an_answer_runs_or_is_loaded(
    open_page: Any, chat_tokenizer: Tokenizer, answers: list[str], bypass_csp: bool
) -> None:
    """Also in a browser that ignores the page's policy."""
    with socket.create_server(("127.0.0.1", 0)) as stranger, chat_server(chat_tokenizer, context=8192) as served:
        stranger.setblocking(False)
        answers[1] = hostile(stranger.getsockname()[1])
        page = open_page(served.url, bypass_csp=bypass_csp)
        # a message of the user is text too
        send(page, "<img src=x onerror=window.hit=29>")
        assert page.evaluate(UNSAFE) == []
        # HTML is shown as it was written
        assert "<svg onload=" in messages(page)[1]
        for part in page.locator("#messages .content :is(a, p, code, td)").all():
            part.dispatch_event("mouseover")
        page.reload()
        assert page.evaluate(UNSAFE) == []
        assert page.evaluate("window.hit") is None
        playwright.expect(page.locator("#message")).to_be_visible()
        assert all(url.startswith((served.url, "data:")) for url in page.requests), page.requests
        assert page.faults == []
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_dompurify_alone_holds(open_page: Any) -> None:
    """HTML that came past the Markdown, in a browser that ignores the page's policy."""
    with socket.create_server(("127.0.0.1", 0)) as stranger, serve() as served:
        stranger.setblocking(False)
        page = open_page(served.url, bypass_csp=True)
        page.evaluate(
            """async html => {
                const { clean } = await import("/page/markdown.js");
                const content = document.createElement("div");
                content.className = "content";
                // the whole, and each line: an element that is open swallows what follows
                for (const part of [html, ...html.split("\\n")]) content.append(clean(part));
                document.getElementById("messages").append(content);
            }""",
            hostile(stranger.getsockname()[1]),
        )
        page.wait_for_timeout(200)
        assert page.evaluate("document.querySelectorAll('#messages .content *').length") > 2
        assert page.evaluate(UNSAFE) == []
        assert page.evaluate("window.hit") is None
        assert page.faults == []
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_the_policy_of_the_page_alone_holds(open_page: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, serve() as served:
        stranger.setblocking(False)
        port = stranger.getsockname()[1]
        page = open_page(served.url)
        # no elements from a text
        refused = page.evaluate(
            "html => { try { document.body.innerHTML = html; return null; } catch (error) { return error.name; } }",
            hostile(port),
        )
        assert refused == "TypeError"
        # nothing is loaded, sent or run
        page.evaluate(
            """port => {
                const add = (tag, fields) => document.body.append(Object.assign(document.createElement(tag), fields));
                add("img", { src: `http://127.0.0.1:${port}/a.png` });
                add("link", { rel: "stylesheet", href: `http://127.0.0.1:${port}/a.css` });
                add("iframe", { src: `http://127.0.0.1:${port}/f` });
                const image = document.createElement("p");
                image.setAttribute("style", `background: url(http://127.0.0.1:${port}/b)`);
                document.body.append(image);
                const script = document.createElement("p");
                try { script.setAttribute("onclick", "window.hit = 1"); } catch {}
                document.body.append(script);
                script.click();
                add("form", { action: `http://127.0.0.1:${port}/post` });
                document.body.lastChild.submit();
                fetch(`http://127.0.0.1:${port}/send`).catch(() => {});
            }""",
            port,
        )
        page.wait_for_timeout(200)
        assert page.evaluate("window.hit") is None
        # Chromium may open a connection for a form or a frame before it reads the policy, and sends nothing
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = stranger.accept()
                with connection, contextlib.suppress(TimeoutError):
                    connection.settimeout(0.1)
                    assert connection.recv(100) == b""


@pytest.mark.nightly
def test_a_text_that_markdown_cannot_read_in_time_is_shown_as_it_is(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url)
        # the last ones are formulas, with an end and without
        formulas = (r"\(a^2\) " * 140_000, r"\[" * 95_000, "$" * 199_000, "$$a" * 60_000, r"\(" + "a" * 199_000)
        for text in ("> " * 5000 + "end", "x" * 200_001, *formulas):
            shown = page.evaluate(
                """async text => {
                    const { MarkdownView } = await import("/page/markdown.js");
                    const view = new MarkdownView();
                    view.show(text);
                    return view.element.textContent;
                }""",
                text,
            )
            assert shown.rstrip("\n") == text, text[:9]
