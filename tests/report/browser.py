"""A page in a browser: with `playwright` installed, its own, or the one that GYRE_BROWSER names with its arguments. Skips where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def opened(file: Path, width: int = 1280) -> Iterator[Any]:
    """The page, which at the end has had no error, said nothing to the console and asked for nothing but its file."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here")
    path, *arguments = os.environ.get("GYRE_BROWSER", "").split() or [None]
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
        except api.Error as e:
            pytest.skip(f"no browser here: {str(e).splitlines()[0]}")
        page, faults = browser.new_page(viewport={"width": width, "height": 900}), []
        page.on("pageerror", lambda e: faults.append(str(e)))
        page.on("console", lambda m: faults.append(m.text))
        page.on("request", lambda r: faults.append(r.url) if not r.url.startswith("file:") else None)
        page.goto(f"file://{file}")
        yield page
        browser.close()
        assert faults == []
