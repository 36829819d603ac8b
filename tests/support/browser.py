"""A plugin: pages in a real Chromium."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from support.waiting import LONG_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("pages are tested in Chromium, which is not on this machine: apt-get install chromium")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync"]
    # names of other sites, for which no network is needed
    quiet += ["--host-resolver-rules=MAP *.example 127.0.0.1"]
    quiet += ["--no-sandbox"] if os.getuid() == 0 else []
    playwright.expect.set_options(timeout=LONG_S * 1000)
    with playwright.sync_playwright() as start:
        browser = start.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def new_browser(chromium: Any) -> Iterator[Any]:
    """Opens a browser without a past."""
    contexts = []

    def opened(**options: Any) -> Any:
        contexts.append(chromium.new_context(**options))
        contexts[-1].set_default_timeout(LONG_S * 1000)
        return contexts[-1]

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def open_page(new_browser: Any) -> Any:
    """Opens a server's page, and records all requests, errors and dialogs of the browser.

    `browser`: the browser to open a tab in. Without one, the browser is a new one.
    """

    def opened(url: str, browser: Any = None, **options: Any) -> Any:
        page = (browser or new_browser(**options)).new_page()
        page.requests, page.faults = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda line: line.type == "error" and page.faults.append(line.text))
        page.on("dialog", lambda dialog: (page.faults.append(dialog.message), dialog.dismiss()))
        page.goto(url)
        return page

    return opened
