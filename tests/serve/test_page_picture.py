"""The picture of the page in the documents, taken on demand.

    LIVE_PAGE_PICTURE=1 python -m pytest tests/serve/test_page_picture.py

starts `draftsmith live serve` on the shipped model and plays the sample: text, times and figures
are those of the machine that takes the picture.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.serve.command import Running
from tests.serve.driving import Page, until

PICTURE = Path(__file__).parents[2] / "docs" / "live-page.png"
WANTED = os.environ.get("LIVE_PAGE_PICTURE", "")
MOST_ROWS = 5
"""That have room in the picture."""


@pytest.mark.skipif(not WANTED, reason="takes a picture when LIVE_PAGE_PICTURE is set")
def test_take_the_picture(browser: Any, forks: Forks) -> None:
    size = {"width": 1360, "height": 850, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    still = {"name": "prefers-reduced-motion", "value": "reduce"}  # underlines that do not fade
    light = {"name": "prefers-color-scheme", "value": "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [still, light]})
    with Running(forks) as server:
        page = Page(browser, server.url)
        page.click("#try")
        until(lambda: page.run("return document.querySelectorAll('.row').length") >= MOST_ROWS)
        page.click("#measure")
        until(lambda: page.text("#speedup") != "–")
        until(lambda: page.run("return document.querySelector('.open .changed')"))
        PICTURE.write_bytes(browser.get_screenshot_as_png())
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
