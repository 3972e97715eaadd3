"""Makes the first page of the site from README.md, and the Chinese one from README.zh-CN.md: ``make docs`` writes both."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGES = {"index.md": "README.md", "zh-CN.md": "README.zh-CN.md"}


def front_page(readme: str) -> str:
    """Return the text of a README as a page of docs/. Links to files that the site does not have become their names. The links
    below the title become buttons: the dots between them are left out.
    """
    names = {readme: page for page, readme in PAGES.items()}

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if target in names or target.startswith("docs/"):
            return f"[{label}]({names.get(target, target.removeprefix('docs/'))})"
        return f"`{label}`" if label == target else label

    head, line, rest = re.split(r"(^\[.* · .*$)", readme, maxsplit=1, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\(([^)]+)\)", link, head + line.replace(" · ", " ") + rest)


def write() -> None:
    for page, readme in PAGES.items():
        (HERE / page).write_text(front_page((HERE.parent / readme).read_text("utf-8")), "utf-8")
