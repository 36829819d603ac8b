"""The chat of the web page in a browser."""

from typing import Any

from mesh_transformer.data.tokens.tokenizer import Tokenizer
from support.served import serve

COMPLETE = "the answer is complete"


def _expect(locator: Any) -> Any:
    # only where pages are tested
    from playwright import sync_api

    return sync_api.expect(locator)


def messages(page: Any) -> list[str]:
    """The texts of the messages, as the reader sees them."""
    # the page hides a restored chat until the server has answered once, and the text of hidden elements has other lines
    _expect(page.locator("#chat")).to_be_visible()
    return page.locator("#messages .content").all_inner_texts()


def send(page: Any, text: str) -> None:
    """Send a message, and wait for the end of its answer."""
    page.fill("#message", text)
    page.click("#send")
    ended(page)


def ended(page: Any) -> None:
    _expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
    _expect(page.locator("#status")).to_contain_text(COMPLETE)


def chat_server(tokenizer: Tokenizer, **options: Any) -> Any:
    return serve(tokenizer=tokenizer, **{"vocab": 259, "context": 512, **options})


def acts(page: Any, number: int) -> dict[str, Any]:
    """The buttons of a message."""
    article = page.locator("#messages article").nth(number)
    return {
        text: article.locator(".acts button", has_text=text) for text in article.locator(".acts").inner_text().split()
    }
