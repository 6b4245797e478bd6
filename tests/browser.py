"""For tests marked `browser`: Playwright's Chromium, or the system's where there is one."""

import shutil
from contextlib import contextmanager


@contextmanager
def chromium():
    from playwright.sync_api import sync_playwright  # an extra

    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=shutil.which("chromium")) as browser,
    ):
        yield browser
