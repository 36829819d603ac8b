"""The web page in a real Chromium, against a server with a fake engine."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from support import fake_engine, loopback
from support.served import KEY, expected, serve, text_of
from support.waiting import until

from mesh_transformer.infer.requests import Token
from mesh_transformer.runtime.serving.model import ServedModel

playwright = pytest.importorskip("playwright.sync_api")
PROMPT = [*b"Hello"]
WEB = Path(__file__).resolve().parents[3] / "mesh_transformer/runtime/serving/web"
# with a seed of its own, the page may get fewer tokens than it asks for
ANSWERED = re.compile("^[0-9] tokens?, ")


def completion(page: Any) -> str:
    return "".join(page.locator("#text span[data-p]").all_text_contents())


def ask(page: Any, **fields: str) -> None:
    page.fill("#prompt", "Hello")
    for name, value in fields.items():
        page.fill(f"[name={name}]", value)


def test_tokens_with_their_probabilities(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url)
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        ask(page, max_tokens="12", seed="1")
        page.keyboard.press("Control+Enter")
        playwright.expect(page.locator("#status")).to_contain_text("12 tokens")
        made = expected(PROMPT, max_tokens=12, logprobs=5, seed=1)
        assert completion(page) == text_of(made)
        page.locator("#text span[data-p]").first.hover()
        tip = page.locator("#tip")
        playwright.expect(tip).to_be_visible()
        assert "%" in tip.inner_text()
        assert all(url.startswith((served.url, "data:")) for url in page.requests), page.requests
        assert page.faults == []
        page.click("#more")  # the completion becomes the prompt
        playwright.expect(page.locator("#text .prompt")).to_have_text("Hello" + text_of(made))
        assert page.input_value("#prompt") == "Hello" + text_of(made)


def words_at_the_end(page: Any) -> str:
    """The status after the end of a completion."""
    status = page.locator("#status")
    playwright.expect(status).to_contain_text(", stopped at")
    return status.inner_text()


def test_the_status_in_plain_words(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url)
        ask(page, max_tokens="12", seed="1")
        page.click("#go")
        assert re.fullmatch(r"12 tokens, [0-9.,]+/s, stopped at max tokens", words_at_the_end(page))
        ask(page, max_tokens="1")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_have_text("1 token, stopped at max tokens")
        made = text_of(expected(PROMPT, max_tokens=12, seed=1))
        ask(page, max_tokens="12", stop=next(letter for letter in made[1:] if letter.isprintable()))
        page.click("#go")
        assert words_at_the_end(page).endswith("/s, stopped at a stop text or the end of text")


def test_continue_asks_for_what_fits(open_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues to the last token of the context, then reports that the context is full."""
    monkeypatch.setattr(ServedModel, "end_tokens", lambda self, others=(), ignore_eos=False: ())
    monkeypatch.setattr(fake_engine, "draw", ascii_draw(fake_engine.draw))
    with serve() as served:
        page = open_page(served.url)
        ask(page, max_tokens="40", seed="1")
        page.click("#go")
        assert words_at_the_end(page).startswith("40 tokens")
        page.click("#more")  # 64 tokens fit, and there are 45
        playwright.expect(page.locator("#status")).to_contain_text("stopped at the end of the context (64 tokens)")
        assert page.locator("#status").inner_text().startswith("19 tokens, ")
        whole = page.locator("#text").text_content()
        assert len(whole) == 64
        page.click("#more")
        playwright.expect(page.locator("#status")).to_contain_text("the context is full (64 tokens)")
        assert page.locator("#text").text_content() == whole
        assert page.locator("#status.bad").count() == 0
        assert page.faults == []


def ascii_draw(draw: Any) -> Any:
    """A `draw` function whose tokens are letters, so that a text has one token per character."""

    def drawn(*asked: Any) -> Any:
        token, finish = draw(*asked)
        return token._replace(id=97 + token.id % 26), finish

    return drawn


def test_prompt_and_settings_survive_the_tab(open_page: Any, new_browser: Any) -> None:
    with serve() as served:
        browser = new_browser()
        page = open_page(served.url, browser)
        ask(page, max_tokens="7", top_k="3", stop="a\nb")
        page.fill("#prompt", "A long story\nof two lines")
        page.reload()
        assert page.input_value("#prompt") == "A long story\nof two lines"
        page.close()
        page = open_page(served.url, browser)
        assert page.input_value("#prompt") == "A long story\nof two lines"
        assert [page.input_value(f"[name={name}]") for name in ("max_tokens", "top_k", "stop")] == ["7", "3", "a\nb"]
        page.click("#defaults")
        assert [page.input_value(f"[name={name}]") for name in ("max_tokens", "top_k", "stop")] == ["64", "0", ""]
        assert open_page(served.url).input_value("#prompt") == "Once upon a time"
        page.click("#forget-all")
        page.get_by_role("button", name="Forget all").first.click()
        for how in (page.reload, lambda: open_page(served.url, browser)):
            how()
            assert page.input_value("#prompt") == "Once upon a time"
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert page.faults == []


def test_a_browser_that_keeps_nothing_says_so(open_page: Any, new_browser: Any) -> None:
    """Storage is switched off, or it has data that the page did not write."""
    with serve() as served:
        browser = new_browser()
        browser.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('off'); } })")
        page = open_page(served.url, browser)
        playwright.expect(page.locator("#kept")).to_contain_text("keeps nothing")
        ask(page, max_tokens="3")
        page.click("#go")
        words_at_the_end(page)
        assert page.faults == []
        page = open_page(served.url)
        for name, value in {"chat": "[null, 3, {}]", "settings": "7", "prompt": "{"}.items():
            page.evaluate("([name, value]) => localStorage.setItem('mesh-transformer.' + name, value)", [name, value])
        page.reload()
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        assert page.input_value("[name=max_tokens]") == "64"
        assert page.faults == []


def test_the_page_says_that_it_streams(open_page: Any) -> None:
    with serve(delay=0.05, context=128) as served:
        page = open_page(served.url)
        ask(page, max_tokens="100", seed="1")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_have_text("streaming")
        playwright.expect(page.locator("#rate")).to_have_text(re.compile(r"[1-9]\d* tokens, [1-9][\d.]* tokens/s"))
        words = page.locator("#used-words").inner_text()
        used = re.fullmatch(r"(\d+) of 128 tokens of the context", words)
        assert used is not None, words
        # the letters of the prompt, and more
        assert 5 < int(used[1]) < 105
        page.click("#stop")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        ask(page, max_tokens="9")
        page.click("#go")
        assert words_at_the_end(page).startswith("9 tokens, ")
        assert page.locator("#used-words").inner_text() == "14 of 128 tokens of the context"
        assert page.locator("#rate").inner_text() == ""


def test_a_warm_up_is_waited_for(open_page: Any) -> None:
    """What is sent during a warm-up is answered after it; also if the server starts again behind the page."""
    with serve(held=True) as served:
        page = open_page(served.url)
        playwright.expect(page.locator("#status")).to_contain_text("the server is warming up")
        ask(page, max_tokens="5")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("the server is warming up")
        served.engine.may_warm_up.set()
        assert ANSWERED.search(words_at_the_end(page))
        served.loop.state = "warming up"
        ask(page, max_tokens="6")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("the server is warming up")
        served.loop.state = "ok"
        playwright.expect(page.locator("#status")).to_contain_text(ANSWERED)
        served.loop.state = "warming up"
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("the server is warming up")
        page.click("#stop")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        served.loop.state = "ok"


def test_a_page_without_an_answer_asks_again(open_page: Any, new_browser: Any) -> None:
    """A browser aborts the first request when the network of its computer changes."""
    browser, aborted = new_browser(), []

    def abort_once(route: Any) -> None:
        if aborted:
            return route.continue_()
        aborted.append(route.request.url)
        return route.abort("connectionaborted")

    browser.route("**/v1/models", abort_once)
    with serve() as served:
        page = open_page(served.url, browser)
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        playwright.expect(page.locator("#status")).to_have_text("")
        assert len(aborted) == 1


def test_stop_frees_the_slot_and_keeps_the_text(open_page: Any) -> None:
    with serve(delay=0.05, context=4096) as served:
        page = open_page(served.url)
        ask(page, max_tokens="3000", seed="1")
        page.click("#go")
        page.wait_for_selector("#text span[data-p]")
        assert served.metric("requests_running") == 1
        page.keyboard.press("Escape")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        until(lambda: served.metric("requests_running") == 0)
        assert completion(page)
        assert page.locator("#go").is_enabled()


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_an_absent_key_and_a_wrong_one_have_their_own_lines(
    open_page: Any, new_browser: Any, size: tuple[int, int]
) -> None:
    with serve(keys=[KEY]) as served:
        browser = new_browser(viewport={"width": size[0], "height": size[1]})
        page = open_page(served.url, browser)
        note = page.locator("#access-note")

        def told(words: str) -> None:
            playwright.expect(note).to_have_text(words)
            playwright.expect(note).to_be_in_viewport(ratio=1)
            playwright.expect(page.locator("#key")).to_be_in_viewport(ratio=1)
            playwright.expect(page.locator("#key")).to_be_focused()

        told("This server needs an API key. Type it here.")
        # a request tells it too, from the end of the page
        page.locator("[name=stop]").scroll_into_view_if_needed()
        page.locator("[name=seed]").press("Enter")
        told("This server needs an API key. Type it here.")
        for wrong in ("sk-wrong", "schlüssel"):
            page.fill("#key", wrong)
            page.keyboard.press("Enter")
            playwright.expect(note).to_contain_text("Check it and type it again.")
        told("An API key has only letters, digits and signs of ASCII. Check it and type it again.")
        page.fill("#key", "sk-wrong")
        page.keyboard.press("Enter")
        told("The server refused this API key. Check it and type it again.")
        assert page.evaluate("localStorage.getItem('mesh-transformer.key')") is None
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#access")).to_be_hidden()
        playwright.expect(page.locator("#prompt")).to_be_focused()
        # the key survives the tab, and the page says so
        page.close()
        page = open_page(served.url, browser)
        note = page.locator("#access-note")
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        assert page.locator("#access").is_hidden()
        playwright.expect(page.locator("#kept")).to_contain_text("It keeps the API key too")
        page.click("#forget-key")
        assert page.locator("#kept-key").is_hidden()
        page.click("#go")
        told("This server needs an API key. Type it here.")


def test_a_refusal_is_told_in_words(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url)
        ask(page, max_tokens="9999")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("9999")
        assert page.locator("#status.bad").count() == 1
        page.fill("[name=top_p]", "7")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("top_p")
    page.fill("[name=top_p]", "1")
    page.click("#go")
    playwright.expect(page.locator("#status")).to_have_text("the server does not answer: does it run?")


def test_text_from_the_model_is_text(open_page: Any) -> None:
    """A prompt with HTML is shown as text."""
    with serve() as served:
        page = open_page(served.url)
        ask(page, max_tokens="12")
        page.fill("#prompt", "<img src=x onerror=alert(1)>")
        page.click("#go")
        words_at_the_end(page)
        assert page.locator("#text img").count() == 0
        assert page.locator("#text .prompt").text_content() == "<img src=x onerror=alert(1)>"


def test_what_the_model_writes_is_text_too(open_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion with HTML, and alternatives with HTML, are shown as text."""
    html = b"<img src=x onerror=alert(1)><script>alert(2)</script>"

    def write(tokens: Any, generated: int, params: Any, vocab: int) -> Any:
        token, _ = draw(tokens, generated, params, vocab)
        top = tuple((ord(character), -1.0) for character in "<&>")
        return Token(html[generated], token.logprob, top), "length" if generated + 1 == len(html) else None

    draw = fake_engine.draw
    monkeypatch.setattr(fake_engine, "draw", write)
    with serve() as served:
        page = open_page(served.url)
        ask(page, max_tokens=str(len(html)))
        page.click("#go")
        words_at_the_end(page)
        assert completion(page) == html.decode()
        page.locator("#text span[data-p]").first.hover()
        playwright.expect(page.locator("#tip")).to_contain_text("<")
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert page.faults == []


def test_a_long_text_stays_usable(open_page: Any) -> None:
    with serve(context=4096) as served:
        page = open_page(served.url)
        ask(page, max_tokens="1500", seed="1", stop="")
        page.locator("[name=seed]").press("Enter")  # in a field of the form
        page.wait_for_selector("#text span[data-p]:nth-of-type(22)", state="attached")
        page.click("#stop")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        page.focus("#text")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement === document.querySelector('#text span[data-p]')")
        playwright.expect(page.locator("#tip")).to_be_visible()
        page.keyboard.press("Tab")  # one key press skips all tokens
        assert page.evaluate("document.activeElement.name") == "max_tokens"


def test_a_failure_in_mid_stream_is_told(open_page: Any) -> None:
    with serve(delay=0.05, context=1024) as served:
        page = open_page(served.url)
        ask(page, max_tokens="900", seed="1")
        page.click("#go")
        page.wait_for_selector("#text span[data-p]")
        served.engine.broken = True
        playwright.expect(page.locator("#status")).to_contain_text("the model failed")
        assert page.locator("#status.bad").count() == 1
        assert page.locator("#go").is_enabled()


def test_it_fits_a_phone_and_goes_by_keyboard(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.locator("#go").bounding_box()["height"] >= 40  # large enough for a thumb
        assert page.evaluate("document.activeElement.id") == "prompt"
        ask(page, seed="1", max_tokens="12")
        page.focus("#prompt")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "go"
        page.keyboard.press("Enter")
        words_at_the_end(page)
        page.locator("#text span[data-p]").first.tap()
        playwright.expect(page.locator("#tip")).to_be_visible()


def test_the_page_asks_nobody_else() -> None:
    with serve(keys=[KEY]) as served:
        for path, file in {"/": "page.html", "/page/page.css": "page.css", "/page/vendor/purify.min.js": None}.items():
            response = served.client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:;" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert file is None or response.text == (WEB / file).read_text()
            again = served.client.get(path, headers={"If-None-Match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/", "/page/nothing.js", "/page/vendor/README.md", "/page/%2e%2e/app.py", "/page/vendor"):
            assert loopback.get(served.url + path).status_code == 404
    for file in WEB.glob("*.*"):
        assert "://" not in file.read_text(), file


@pytest.mark.nightly
def test_the_libraries_are_those_of_the_list() -> None:
    """Every vendored file has its licence, and the checksum and version that the list names."""
    listed = (WEB / "vendor/README.md").read_text()
    scripts = sorted((WEB / "vendor").glob("*.js"))
    assert len(scripts) == 2
    for script in scripts:
        (line,) = [line for line in listed.splitlines() if line.startswith(f"| `{script.name}`")]
        assert hashlib.sha256(script.read_bytes()).hexdigest() in line
        package, version, licence = re.search(r"\| (\w+) ([\d.]+), .*\(([\w.]+)\) \|", line).groups()
        assert version in script.read_text()[:400]
        assert "opyright" in (WEB / "vendor" / licence).read_text()
        assert licence == f"{package}.LICENSE"
