"""The page in a real browser: it is shown without a network or an error, on a phone as well and in dark colours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright
from run_files import RunFiles, picture

from swift_stage2.report.command import report_of
from swift_stage2.report.content import page_of
from swift_stage2.report.run_data import read_run

pytestmark = pytest.mark.browser

EVIL = "</script><script>window.broken = 1</script><img src=x onerror=window.broken=1>"
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}
NUM_MATCHES = 15


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything, texts that attack, and an image that is absent."""
    run_dir = tmp_path_factory.mktemp("run")
    run = RunFiles(run_dir)
    run.start().train(60).evaluate()
    image = picture(run_dir / "images" / "street.png")
    for number in range(NUM_MATCHES):
        missed = number % 3 == 0
        run.match(
            [number, 0, number % 5, 0],
            version=1 + number // 5,
            pairs=[] if missed else [[0, 0, 0.96]],
            images=[str(run_dir / EVIL) if number == 4 else image],
            label=EVIL if number % 5 % 2 else "car",
            rollout=f"{EVIL} {number}",
            target=EVIL,
            dropped={"invalid_box": 1} if number == 7 else {},
        )
    run.end()
    path = run_dir / "report.html"
    path.write_text(page_of(report_of(read_run([run_dir]))))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("the page is tested in a browser, got no chromium on PATH; run scripts/setup --browser")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=[*ARGUMENTS])
        yield found
        found.close()


class Visit:
    """One opened page and what went wrong on it."""

    def __init__(self, browser: Browser, path: Path, width: str = "desktop", scheme: str = "light") -> None:
        across, down = WIDTHS[width]
        self._context = browser.new_context(
            viewport={"width": across, "height": down},
            color_scheme=scheme,  # type: ignore[arg-type]
        )
        self.troubles: list[str] = []
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", self._asked)
        self.page.route(
            "**/*", lambda route: route.continue_() if self._is_ours(route.request) else route.abort()
        )
        self._path = path
        self.page.goto(path.as_uri())

    def close(self) -> None:
        self.check()
        self._context.close()

    def check(self) -> None:
        assert self.page.evaluate("window.broken") is None
        assert self.troubles == []

    def _is_ours(self, request: Request) -> bool:
        return request.url.split("#")[0] == self._path.as_uri() or request.url.startswith("data:")

    def _asked(self, request: Request) -> None:
        if not self._is_ours(request):
            self.troubles.append(f"asked for {request.url}")


@pytest.fixture(params=[("desktop", "light"), ("phone", "dark")], ids="-".join)
def visit(browser: Browser, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Visit]:
    opened = Visit(browser, page_file, *request.param)
    yield opened
    opened.close()


def test_nothing_is_wider_than_the_screen(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_pictures_are_the_newest_first_with_a_word_where_there_is_none(visit: Visit) -> None:
    cards = visit.page.locator(".card")
    assert cards.count() == NUM_MATCHES
    assert cards.first.locator("pre").first.text_content() == f"{EVIL} {NUM_MATCHES - 1}"
    images = visit.page.locator(".card img")
    assert images.count() == NUM_MATCHES - 1
    assert images.evaluate_all("all => all.every(one => one.complete && one.naturalWidth >= 300)")
    assert "No picture: " in cards.nth(NUM_MATCHES - 1 - 4).inner_text()
