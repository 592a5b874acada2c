"""The page in a real browser: it draws without a network or an error, and keyboard, phone and dark colours work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from evaluated_run import evaluated_run, grid_scene
from playwright.sync_api import Browser, Page, Request, sync_playwright
from run_files import RunFiles, balanced_ledger, picture

from swift_stage2.cli import main
from swift_stage2.pages.page import page_of, write_page
from swift_stage2.report.report import report_of
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
    balanced_ledger(run_dir, num_samples=30).ledger.close()
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
    write_page(path, page_of(report_of(read_run([run_dir]))))
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


@pytest.fixture(scope="module")
def opened_once(browser: Browser, page_file: Path) -> Iterator[Visit]:
    """On the desktop in light colours; to draw its figures takes seconds."""
    opened = Visit(browser, page_file)
    yield opened
    opened.close()


@pytest.fixture
def visit(opened_once: Visit) -> Iterator[Visit]:
    """The page that was opened once, with the newest of all pictures and nothing focused; Tab begins at its top."""
    opened_once.page.evaluate(
        "document.querySelector('[data-filter=all]').click(); document.body.tabIndex = -1; document.body.focus()"
    )
    yield opened_once
    opened_once.check()


def names(page: Page) -> list[str]:
    """The rollouts shown, by their number."""
    return [text.rsplit(" ", 1)[-1] for text in page.locator(".card pre:first-of-type").all_inner_texts()]


def focus_by_tab(page: Page, selector: str, limit: int = 120) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"{selector} is not reached with Tab")


def test_every_figure_is_drawn_with_a_table_behind_it(visit: Visit) -> None:
    plots = visit.page.locator(".plot")
    keys = plots.evaluate_all("plots => plots.map(plot => plot.dataset.figure)")
    drawn = "wanted main_thread pipeline queue lag rounds quality evaluations drift fill"
    assert set(keys) == set(drawn.split())
    for number in range(plots.count()):
        marks = plots.nth(number).locator(".trace path, .trace .point, .bars path")
        assert marks.count() > 0
        assert plots.nth(number).get_attribute("aria-label")
    assert visit.page.locator("figure details table tbody tr").count() > 100
    behind = visit.page.locator("figure details table").first
    assert not behind.is_visible()
    visit.page.locator("figure summary").first.press("Enter")
    assert behind.is_visible()


def test_bounds_of_the_drift_and_the_window_are_drawn(visit: Visit) -> None:
    assert visit.page.locator('[data-figure="drift"] .errorbar').count() == 2
    assert "version_window = 2" in visit.page.locator('[data-figure="lag"] .legend').text_content()


def is_as_wide_as_the_screen(page: Page, width: str) -> bool:
    box = page.locator(".plot .main-svg").first.bounding_box()
    assert box is not None
    across, _ = WIDTHS[width]
    return box["width"] <= across == page.evaluate("document.documentElement.scrollWidth")


def test_nothing_is_wider_than_the_screen(visit: Visit) -> None:
    assert is_as_wide_as_the_screen(visit.page, "desktop")


def test_nothing_is_wider_than_a_phone_and_the_newest_pictures_come_first(
    browser: Browser, page_file: Path
) -> None:
    opened = Visit(browser, page_file, "phone", "dark")
    assert is_as_wide_as_the_screen(opened.page, "phone")
    assert names(opened.page) == ["14", "13", "12", "11", "10", "9"]
    opened.close()


@pytest.mark.slow
def test_dark_colours_follow_the_system_and_the_button(browser: Browser, page_file: Path) -> None:
    opened = Visit(browser, page_file, scheme="dark")
    page = opened.page
    assert is_as_wide_as_the_screen(page, "desktop")

    def is_shown(ground: str, ink: str) -> None:
        """The charts are drawn anew some time after the page has changed."""
        shown = (
            "([ground, ink]) => getComputedStyle(document.body).backgroundColor === ground && "
            "getComputedStyle(document.querySelector('.plot .xtick text')).fill === ink"
        )
        page.wait_for_function(shown, arg=[ground, ink])

    dark, light = ("rgb(20, 22, 26)", "rgb(232, 234, 238)"), ("rgb(255, 255, 255)", "rgb(27, 29, 33)")
    is_shown(*dark)
    page.get_by_role("button", name="Show in light colours").press("Enter")
    is_shown(*light)
    page.get_by_role("button", name="Show in dark colours").click()
    is_shown(*dark)
    page.reload()
    page.emulate_media(color_scheme="light")
    is_shown(*light)
    opened.close()


def test_pictures_page_by_arrow_keys(visit: Visit) -> None:
    page = visit.page
    assert names(page) == ["14", "13", "12", "11", "10", "9"]
    page.locator(".pictures").focus()
    page.keyboard.press("ArrowLeft")  # nothing is newer
    page.keyboard.press("ArrowRight")
    assert names(page) == ["8", "7", "6", "5", "4", "3"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # nothing is older
    assert names(page) == ["2", "1", "0"]
    assert page.locator(".place").inner_text() == "page 3 of 3, 15 pictures"
    page.get_by_role("button", name="Newer").press("Enter")
    assert names(page)[0] == "8"


def test_pictures_are_filtered_by_outcome_with_the_keyboard(visit: Visit) -> None:
    page = visit.page
    focus_by_tab(page, '[data-filter="has missed"]')
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    assert names(page) == ["12", "9", "6", "3", "0"]
    assert page.locator('[data-filter="has missed"]').get_attribute("aria-pressed") == "true"
    page.locator('[data-filter="dropped objects"]').press("Space")
    assert names(page) == ["7"]
    page.locator('[data-filter="all matched"]').press("Enter")
    assert len(names(page)) == 6
    page.locator('[data-filter="nothing found"]').press("Enter")
    assert len(names(page)) == 5


def test_boxes_lie_over_their_image_or_over_a_plain_box(visit: Visit) -> None:
    page = visit.page
    shown = page.locator(".card").filter(has_text=f"{EVIL} 12")
    assert shown.locator("rect").evaluate_all("all => all.map(one => one.getAttribute('class'))") == [
        "box missed",
        "box false",
    ]
    styles = page.evaluate(
        "['truth', 'matched', 'missed', 'false'].map(part => {"
        " const style = getComputedStyle(document.querySelector(`.legend .${part}`));"
        " return [style.stroke, style.strokeDasharray]; })"
    )
    assert len({colour for colour, _ in styles}) == len({dash for _, dash in styles}) == 4
    assert page.evaluate("document.querySelector('.card image').getBoundingClientRect().width") > 100
    page.locator(".pictures").press("ArrowRight")
    absent = page.locator(".card").filter(has_text="No image: there is no such file here")
    assert absent.count() == 1
    assert absent.locator("image").count() == 0
    assert absent.locator("rect").count() == 2


def test_texts_of_models_and_data_sets_are_shown_as_they_are(visit: Visit) -> None:
    card = visit.page.locator(".card").first
    assert card.locator("pre").all_inner_texts() == [f"{EVIL} 14", EVIL]
    assert visit.page.locator(".card script, .card img").count() == 0
    assert visit.page.locator(".card .tag").all_text_contents().count(EVIL) >= 1


def test_a_skip_link_leads_past_the_navigation(visit: Visit) -> None:
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.textContent") == "Skip to the report"
    visit.page.keyboard.press("Enter")
    assert visit.page.evaluate("document.activeElement.id") == "content"
    levels = visit.page.locator("h1, h2, h3").evaluate_all("all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


@pytest.mark.slow
def test_a_group_stays_on_one_page_under_its_heading(browser: Browser, tmp_path: Path) -> None:
    """Groups of four, where a page is full at six."""
    balanced_ledger(tmp_path, num_generations=4).ledger.close()
    run = RunFiles(tmp_path)
    run.start().train(12)
    for number in range(12):
        missed = number in (1, 9)
        run.match(
            [0, number, number // 4, 0],
            rollout=f"said {number}",
            pairs=[] if missed else [[0, 0, 0.96]],
            reward={"total": -number},
        )
    run.end()
    path = tmp_path / "report.html"
    write_page(path, page_of(report_of(read_run([tmp_path]))))
    opened = Visit(browser, path)
    headings = opened.page.locator(".cards > .group")
    assert names(opened.page) == ["8", "9", "10", "11", "4", "5", "6", "7"]
    assert [text.partition(",")[0] for text in headings.all_inner_texts()] == ["Group 2", "Group 1"]
    kinds = opened.page.locator(".cards > *").evaluate_all("all => all.map(one => one.className)")
    assert kinds == ["group", *["card"] * 4] * 2
    opened.page.locator(".pictures").press("ArrowRight")
    assert names(opened.page) == ["0", "1", "2", "3"]
    assert opened.page.locator(".place").inner_text() == "page 2 of 2, 12 pictures"
    opened.page.get_by_role("button", name="has missed").click()
    assert names(opened.page) == ["9", "1"]
    assert [text.partition(",")[0] for text in headings.all_inner_texts()] == ["Group 2", "Group 0"]
    opened.close()


def test_a_run_without_channel_b_has_a_page_too(browser: Browser, tmp_path: Path) -> None:
    RunFiles(tmp_path).start().train(12, with_b=False).end()
    path = tmp_path / "report.html"
    write_page(path, page_of(report_of(read_run([tmp_path]))))
    opened = Visit(browser, path)
    assert opened.page.locator(".plot").count() == 1
    assert opened.page.locator(".pictures").count() == 0
    opened.close()


@pytest.mark.slow
def test_a_comparison_is_no_wider_than_a_phone_and_its_pictures_page(
    browser: Browser, tmp_path: Path
) -> None:
    """Its tables end in words and have six columns."""
    truth = grid_scene(8)
    for name, found in (("a", truth), ("b", dict.fromkeys(truth, ()))):
        evaluated_run(tmp_path / name, truth, [found])
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    opened = Visit(browser, tmp_path / "b" / "comparison.html", "phone")
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.page.locator(".pictures").press("ArrowRight")
    assert opened.page.locator(".place").inner_text() == "page 2 of 2, 8 pictures"
    opened.close()
