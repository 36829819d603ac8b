"""The web page in a real Chromium, against a server with a fake engine."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import fake_engine
from support.chat_templates import CHATML, chat_folder
from support.served import KEY, expected, serve, text_of, wait_until

from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.infer.requests import Token
from mesh_transformer.runtime.serving.model import ServedModel

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROMPT = [*b"Hello"]

if CHROMIUM is None:
    pytest.skip(
        "the page is tested in Chromium, which is not on this machine: apt-get install chromium",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync"]
    quiet += ["--no-sandbox"] if os.getuid() == 0 else []
    with playwright.sync_playwright() as start:
        browser = start.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Any]:
    """Opens a server's page, and records all requests and errors of the browser."""
    contexts = []

    def opened(url: str, **options: Any) -> Any:
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.requests, page.faults = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()


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


def test_the_prompt_survives_a_reload(open_page: Any) -> None:
    with serve() as served:
        page = open_page(served.url)
        page.fill("#prompt", "A long story\nof two lines")
        page.reload()
        assert page.input_value("#prompt") == "A long story\nof two lines"
        page.goto(f"{served.url}/version")
        page.goto(served.url)
        assert page.input_value("#prompt") == "A long story\nof two lines"
        assert open_page(served.url).input_value("#prompt") == "Once upon a time"


def test_stop_frees_the_slot_and_keeps_the_text(open_page: Any) -> None:
    with serve(delay=0.05, context=4096) as served:
        page = open_page(served.url)
        ask(page, max_tokens="3000", seed="1")
        page.click("#go")
        page.wait_for_selector("#text span[data-p]")
        assert served.metric("requests_running") == 1
        page.keyboard.press("Escape")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        wait_until(lambda: served.metric("requests_running") == 0)
        assert completion(page)
        assert page.locator("#go").is_enabled()


def test_a_key_and_a_refusal_are_told_in_words(open_page: Any) -> None:
    with serve(keys=[KEY]) as served:
        page = open_page(served.url)
        playwright.expect(page.locator("#status")).to_contain_text("API key")
        page.fill("[name=key]", KEY)
        ask(page, max_tokens="9999")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("9999")
        assert page.locator("#status.bad").count() == 1
        page.fill("[name=top_p]", "7")
        page.click("#go")
        playwright.expect(page.locator("#status")).to_contain_text("top_p")


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
        page.click("#stop", timeout=5000)
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


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(chat_folder(tmp_path_factory.mktemp("chat"))))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, chat_tokenizer: Tokenizer) -> list[str]:
    """The model's answers. It writes the one with the number of messages in the prompt, then its end token."""
    texts = ["no message", "Four.\nYes <b>four</b>.", "no answer", "The second answer."]

    def draw(tokens: Any, generated: int, params: Any, vocab: int) -> Any:
        asked = texts[list(tokens).count(1) - 1]
        ids = [*chat_tokenizer.encode(asked), 2]
        return Token(ids[generated], -0.1), "stop" if generated + 1 == len(ids) else None

    monkeypatch.setattr(fake_engine, "draw", draw)
    return texts


def messages(page: Any) -> list[str]:
    return page.locator("#messages p").all_text_contents()


def chat_server(tokenizer: Tokenizer, **options: Any) -> Any:
    return serve(tokenizer=tokenizer, **{"vocab": 259, "context": 512, **options})


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
        playwright.expect(page.locator("#messages p")).to_have_count(4)
        playwright.expect(page.locator("#messages p").last).to_have_text(answers[3])
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
        playwright.expect(page.locator("#messages p").last).to_have_text("with")


def test_stop_keeps_the_part_of_an_answer(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    answers[1] = "a long answer\n" * 30
    with chat_server(chat_tokenizer, delay=0.05) as served:
        page = open_page(served.url)
        page.fill("#message", "Hi")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#messages .assistant p")).to_contain_text("a long")
        page.click("#halt")
        playwright.expect(page.locator("#status")).to_have_text("stopped")
        wait_until(lambda: served.metric("requests_running") == 0)
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
        playwright.expect(page.locator("#status")).to_contain_text("API key")
        page.fill("[name=key]", KEY)
        page.keyboard.press("Tab")
        playwright.expect(page.locator("#message")).to_be_visible()
        playwright.expect(page.locator("#status")).to_have_text("")


def test_a_chat_fits_a_phone(open_page: Any, chat_tokenizer: Tokenizer, answers: list[str]) -> None:
    with chat_server(chat_tokenizer) as served:
        page = open_page(served.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        page.fill("#message", "x" * 100)
        page.tap("#send")
        playwright.expect(page.locator("#messages .assistant p")).to_have_text(answers[1])
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.locator("#send").bounding_box()["height"] >= 40
        answers[3] = "line\n" * 60
        page.fill("#message", "More")
        page.tap("#send")
        playwright.expect(page.locator("#status")).to_contain_text("the answer is complete")
        playwright.expect(page.locator("#messages p")).to_have_count(4)
        below = page.evaluate(
            "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.querySelector('#messages'))"
        )
        assert below < 2
        assert page.locator("#messages").bounding_box()["height"] < 740


def test_the_page_is_one_file_that_asks_nobody_else(repo: Path) -> None:
    with serve() as served:
        response = httpx.get(served.url)
        assert response.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in response.headers["content-security-policy"]
    content = (repo / "mesh_transformer/runtime/serving/page.html").read_text()
    assert response.text == content
    assert "http://" not in content
    assert "https://" not in content
