"""A headless browser with a server for it; a live server with a client."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.driving import Page
from tests.serve.fake_server import FakeServer

if TYPE_CHECKING:
    from tests.serve.serving import Client, Served

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --window-size=1280,800
""".split()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver and importlib.util.find_spec("selenium")):
        pytest.skip("needs chromium, chromedriver and selenium")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as one:
        yield one


@pytest.fixture
def page(browser: Any, server: FakeServer) -> Page:
    return Page(browser, server.url)


@pytest.fixture
def downloads(browser: Any, tmp_path: Path) -> Path:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    return tmp_path


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    """A server for all tests of a module."""
    from tests.serve.serving import Served

    with Served() as one:
        yield one


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """The module's server: without sessions before a test, and after it."""
    yield running
    running.end_sessions()


@pytest.fixture
def talk(served: Served) -> Iterator[Client]:
    from tests.serve.serving import Client

    with Client(served) as one:
        assert one.start()["type"] == "ready"
        yield one
