"""Checks each page of the site in a real browser, in light and dark: ``make site-check``, which builds the site first.

A small server serves the site on the loopback address. The program reports these faults: requests to other hosts, which it
blocks; links and anchors without a target; missing pictures; errors of scripts; text with too little contrast; elements that are
wider than the page; and a search without the right result. It stores screenshots of some pages in ``build/site-pictures``.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urldefrag

from playwright.sync_api import Browser, BrowserContext, Page, Route, TimeoutError, ViewportSize, sync_playwright

ROOT = Path(__file__).parents[1]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "site-pictures"
SCHEMES: dict[Literal["light", "dark"], str] = {"light": "default", "dark": "slate"}
WIDE: ViewportSize = {"width": 1440, "height": 1000}
NARROW: ViewportSize = {"width": 390, "height": 800}
PICTURED = ("", "zh-CN/", "monitoring/", "options/", "coming-from-kafka/", "api/")
SEARCHED_WORD, RESULT_PAGE = "maxOffsetsPerTrigger", "options/"

# The least contrast of text that WCAG demands (AA), and that of large text.
_CONTRAST, _LARGE_CONTRAST = 4.5, 3.0
_PAGE_FACTS = (Path(__file__).parent / "check_site.js").read_text("utf-8")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: failed requests are reported with the page that made them."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder in the block, and return its address, which ends with a slash."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class SchemeCheck:
    """Checks all pages in one scheme. ``faults``: what is wrong. ``links``: each link, with a page that has it. ``anchors``: the
    anchors of each page.
    """

    def __init__(self, browser: Browser, home: str, scheme: Literal["light", "dark"]) -> None:
        self.home, self.scheme = home, scheme
        self.faults: list[str] = []
        self.links: dict[str, str] = {}
        self.anchors: dict[str, set[str]] = {}
        self.context: BrowserContext = browser.new_context(color_scheme=scheme, viewport=WIDE)
        self.context.route("**/*", self._block_others)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self._fault(f"script: {error}"))
        self.page.on(
            "console", lambda message: self._fault(f"console: {message.text}") if message.type == "error" else None
        )
        self.page.on(
            "response", lambda answer: self._fault(f"{answer.status} {answer.url}") if answer.status >= 400 else None
        )

    def _fault(self, what: str) -> None:
        where = self.page.url.removeprefix(self.home) or "start"
        self.faults.append(f"{where} ({self.scheme}): {what}")

    def _block_others(self, route: Route) -> None:
        if route.request.url.startswith((self.home, "data:", "blob:")):
            route.continue_()
        else:
            self._fault(f"request to another host: {route.request.url}")
            route.abort()

    def check(self, path: str) -> None:
        """Check one page, in a wide window and in that of a phone."""
        self.page.set_viewport_size(WIDE)
        self.page.goto(self.home + path)
        facts = self.page.evaluate(_PAGE_FACTS)
        if facts["scheme"] != SCHEMES[self.scheme]:
            self._fault(f"has the scheme {facts['scheme']}")
        self.links |= dict.fromkeys(facts["links"], self.page.url)
        self.anchors[self.page.url] = set(facts["ids"])
        for picture in facts["missingPictures"]:
            self._fault(f"missing picture: {picture}")
        for text in facts["texts"]:
            if text["contrast"] < (_LARGE_CONTRAST if text["large"] else _CONTRAST):
                self._fault(f"low contrast, {text['contrast']:.1f}: {text['what']}")
        self._check_width(path, "wide", WIDE, facts["cut"])
        self.page.set_viewport_size(NARROW)
        self._check_width(path, "phone", NARROW, self.page.evaluate(_PAGE_FACTS)["cut"])

    def _check_width(self, path: str, name: str, size: ViewportSize, cut: list[str]) -> None:
        """Report what is wider than the page, and take a screenshot of some pages."""
        for what in cut:
            self._fault(f"wider than its page at {size['width']}: {what}")
        if path in PICTURED:
            PICTURES.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=PICTURES / f"{path.strip('/') or 'start'}-{name}-{self.scheme}.png")

    def check_links(self) -> None:
        """Check each link within the site: its target, a page or a file, exists, and has the anchor."""
        for link, page in self.links.items():
            target, anchor = urldefrag(link)
            if not target.startswith(self.home):
                continue
            if target in self.anchors:
                if anchor and anchor not in self.anchors[target]:
                    self.faults.append(f"{page}: no such anchor: {link}")
            elif not self.context.request.get(target).ok:
                self.faults.append(f"{page}: no such page: {link}")

    def attempt(self, action: Callable[[], None]) -> None:
        """Call a check that waits for elements. A timeout is a fault."""
        try:
            action()
        except TimeoutError as e:
            self._fault(f"{action.__name__}: {e.message}")

    def search(self) -> None:
        """Check that a word, typed into the search box, leads to its page."""
        self.page.set_viewport_size(WIDE)
        self.page.goto(self.home)
        box = self.page.get_by_role("textbox", name="Search")
        box.click()
        # The page ignores what is typed before it has loaded the index.
        self.page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()
        box.press_sequentially(SEARCHED_WORD)
        results = self.page.locator(".md-search-result__item a")
        results.first.wait_for()
        targets = [str(result.get_attribute("href")) for result in results.all()]
        if not any(RESULT_PAGE in target for target in targets):
            self._fault(f"{SEARCHED_WORD} is not found on {RESULT_PAGE}, but on {targets}")
        results.first.click()
        self.page.locator(f"article:has-text('{SEARCHED_WORD}')").wait_for()

    def change_scheme(self) -> None:
        """Check that the button changes the scheme."""
        self.page.goto(self.home)
        self.page.locator("label[for^=__palette]:visible").click()
        other = next(name for name in SCHEMES.values() if name != SCHEMES[self.scheme])
        self.page.locator(f"body[data-md-color-scheme={other}]").wait_for()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chromium", help="the browser's program: .ci/machine chromium prints one")
    program = parser.parse_args().chromium
    pages = sorted(str(path.parent.relative_to(SITE)).strip(".") for path in SITE.rglob("index.html"))
    faults: list[str] = []
    links: set[str] = set()
    with served(SITE) as home, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program)
        for scheme in SCHEMES:
            check = SchemeCheck(browser, home, scheme)
            for path in pages:
                check.check(f"{path}/" if path else "")
            check.check_links()
            for action in (check.search, check.change_scheme):
                check.attempt(action)
            faults += check.faults
            links |= check.links.keys()
        version = browser.version
        browser.close()
    print(
        "\n".join(faults)
        or f"{len(pages)} pages and {len(links)} links, in light and dark: no faults (Chromium {version})"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
