"""Makes the first page of the site from README.md, and the Chinese one from README.zh-CN.md: ``make docs`` writes both."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGES = {"index.md": "README.md", "zh-CN.md": "README.zh-CN.md"}


def front_page(readme: str) -> str:
    """Convert the text of a README to a page of docs/. A link to a file that the site does not have becomes its label. The links
    below the title become buttons, without the dots between them.
    """
    pages = {name: page for page, name in PAGES.items()}

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target:
            return match[0]
        if target in pages or target.startswith("docs/"):
            return f"[{label}]({pages.get(target, target.removeprefix('docs/'))})"
        return f"`{label}`" if label == target else label

    head, line, rest = re.split(r"(^\[.* · .*$)", readme, maxsplit=1, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\(([^)]+)\)", link, head + line.replace(" · ", " ") + rest)


def write() -> None:
    for page, readme in PAGES.items():
        (HERE / page).write_text(front_page((HERE.parent / readme).read_text("utf-8")), "utf-8")
