"""What tests of the page ask of a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.serve.fake_server import Message

SECONDS = 20


def until(true: Callable[[], object]) -> None:
    """Wait for something, for as long as a busy machine may need."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(None, SECONDS, poll_frequency=0.02).until(lambda _: true())


class Page:
    """A page with what tests ask of it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        for kind in ("browser", "performance"):
            browser.get_log(kind)  # what earlier pages left
        browser.get(url)
        until(lambda: self.text("#status") == "live")

    def run(self, script: str, *values: object) -> Any:
        return self.browser.execute_script(script, *values)

    def text(self, selector: str) -> str | None:
        """All text of an element, shown or not; None: there is none."""
        found: str | None = self.run(
            "return document.querySelector(arguments[0])?.textContent ?? null", selector
        )
        return found

    def row(self, seg: int, part: str) -> str | None:
        return self.text(f"[data-seg='{seg}'] {part}")

    def joined(self, seg: int, part: str) -> str:
        """The texts of all such parts of a translation, in order."""
        selector = f"[data-seg='{seg}'] .translation {part}"
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return "".join(self.run(f"{script}.join('')", selector))

    def shown(self, selector: str) -> bool:
        return bool(self.browser.find_element("css selector", selector).is_displayed())

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, text: str) -> None:
        self.click("[name=mode][value=type]")
        self.browser.find_element("id", "typed").send_keys(text)

    def slide(self, name: str, *values: float) -> None:
        """Over all these values at once."""
        script = """
            const slider = document.getElementById(arguments[0]);
            for (const value of arguments[1]) {
                slider.value = value;
                slider.dispatchEvent(new Event("input", { bubbles: true }));
            }
        """
        self.run(script, name, values)

    def paste(self, name: str, text: str) -> None:
        self.run("document.getElementById(arguments[0]).value = arguments[1]", name, text)

    def complaints(self) -> list[str]:
        return [one["message"] for one in self.browser.get_log("browser")]


def finals(messages: Iterable[Message]) -> list[str]:
    return [one["text"] for one in messages if one["final"]]
