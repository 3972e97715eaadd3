"""Puts the site's pages into what is built, for ``rocketmq-spark help``. Everything else is in setup.cfg."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # then the command finds docs/ itself
            return
        pages = Path(self.build_lib) / "rocketmq_spark" / "pages"
        shutil.rmtree(pages, ignore_errors=True)  # of a build before, with pages that are gone
        for page in Path("docs").rglob("*.md"):
            copy = pages / page.relative_to("docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, copy)


setup(cmdclass={"build_py": BuildWithPages})
