"""Looks at the site in a real browser, page by page, in light and dark: ``make site-check``, which makes the site first.

It is served on the loopback address, and whatever a page asks of another host is refused and told as a fault. So are links and
anchors that lead nowhere, pictures that are missing, errors of scripts, text that is hard to read, what is wider than its page,
and a search that finds nothing. Pictures of some pages, for eyes, are left in ``build/site-pictures``.
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
from urllib.parse import urldefrag

from playwright.sync_api import Browser, BrowserContext, Page, Route, TimeoutError, sync_playwright

ROOT = Path(__file__).parents[1]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "site-pictures"
SCHEMES = {"light": "default", "dark": "slate"}
WIDE, NARROW = {"width": 1440, "height": 1000}, {"width": 390, "height": 800}
SHOWN = ("", "zh-CN/", "monitoring/", "options/", "coming-from-kafka/", "api/")
WORD, ITS_PAGE = "maxOffsetsPerTrigger", "options/"

# What WCAG asks of text (AA); of large text it asks 3.
_CONTRAST, _LARGE_CONTRAST = 4.5, 3.0
_FACTS = (Path(__file__).parent / "check_site.js").read_text("utf-8")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: what fails is told with its page."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the folder, with a slash at its end."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class Visit:
    """All pages in one scheme. ``faults`` is what was found, ``links`` where pages lead, by the pages that do."""

    def __init__(self, browser: Browser, home: str, scheme: str) -> None:
        self.home, self.scheme = home, scheme
        self.faults: list[str] = []
        self.links: dict[str, str] = {}
        self.anchors: dict[str, set[str]] = {}
        self.context: BrowserContext = browser.new_context(color_scheme=scheme, viewport=WIDE)  # type: ignore[arg-type]
        self.context.route("**/*", self._only_here)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self._fault(f"script: {error}"))
        self.page.on("console", lambda said: self._fault(f"console: {said.text}") if said.type == "error" else None)
        self.page.on("response", lambda told: self._fault(f"{told.status} {told.url}") if told.status >= 400 else None)

    def _fault(self, what: str) -> None:
        where = self.page.url.removeprefix(self.home) or "start"
        self.faults.append(f"{where} ({self.scheme}): {what}")

    def _only_here(self, route: Route) -> None:
        if route.request.url.startswith((self.home, "data:", "blob:")):
            route.continue_()
        else:
            self._fault(f"asks another host: {route.request.url}")
            route.abort()

    def look(self, path: str) -> None:
        """At one page, wide and narrow."""
        self.page.set_viewport_size(WIDE)  # type: ignore[arg-type]
        self.page.goto(self.home + path)
        facts = self.page.evaluate(_FACTS)
        if facts["scheme"] != SCHEMES[self.scheme]:
            self._fault(f"is shown in {facts['scheme']}")
        self.links |= dict.fromkeys(facts["links"], self.page.url)
        self.anchors[self.page.url] = set(facts["ids"])
        for picture in facts["missingPictures"]:
            self._fault(f"no picture: {picture}")
        for text in facts["texts"]:
            if text["contrast"] < (_LARGE_CONTRAST if text["large"] else _CONTRAST):
                self._fault(f"hard to read, {text['contrast']:.1f}: {text['what']}")
        self._check_width(path, "wide", WIDE, facts["cut"])
        self.page.set_viewport_size(NARROW)  # type: ignore[arg-type]
        self._check_width(path, "phone", NARROW, self.page.evaluate(_FACTS)["cut"])

    def _check_width(self, path: str, name: str, size: dict[str, int], cut: list[str]) -> None:
        """Report what is wider than the page, and take a screenshot of some pages."""
        for what in cut:
            self._fault(f"wider than its page at {size['width']}: {what}")
        if path in SHOWN:
            PICTURES.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=PICTURES / f"{path.strip('/') or 'start'}-{name}-{self.scheme}.png")

    def follow(self) -> None:
        """Every link of the site to the site: there is such a page or file, and such a place on it."""
        for link, page in self.links.items():
            target, anchor = urldefrag(link)
            if not target.startswith(self.home):
                continue
            if target in self.anchors:
                if anchor and anchor not in self.anchors[target]:
                    self.faults.append(f"{page}: no such place: {link}")
            elif not self.context.request.get(target).ok:
                self.faults.append(f"{page}: no such page: {link}")

    def try_out(self, doing: Callable[[], None]) -> None:
        """What waits for something to come; a fault where it does not."""
        try:
            doing()
        except TimeoutError as e:
            self._fault(f"{doing.__name__}: {e.message}")

    def search(self) -> None:
        """A word, typed into the box, leads to its page."""
        self.page.set_viewport_size(WIDE)  # type: ignore[arg-type]
        self.page.goto(self.home)
        box = self.page.get_by_role("textbox", name="Search")
        box.click()
        # What is typed before the index is there is not looked for.
        self.page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()
        box.press_sequentially(WORD)
        results = self.page.locator(".md-search-result__item a")
        results.first.wait_for()
        found = [str(one.get_attribute("href")) for one in results.all()]
        if not any(ITS_PAGE in one for one in found):
            self._fault(f"{WORD} is not found on {ITS_PAGE}, but on {found}")
        results.first.click()
        self.page.locator(f"article:has-text('{WORD}')").wait_for()

    def change(self) -> None:
        """The button takes the other scheme."""
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
            visit = Visit(browser, home, scheme)
            for path in pages:
                visit.look(f"{path}/" if path else "")
            visit.follow()
            for doing in (visit.search, visit.change):
                visit.try_out(doing)
            faults += visit.faults
            links |= visit.links.keys()
        version = browser.version
        browser.close()
    print(
        "\n".join(faults) or f"{len(pages)} pages and {len(links)} links, in light and dark: well (Chromium {version})"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
