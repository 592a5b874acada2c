"""Shows one web page after another in headless Chromium and tells what is seen of each.

Pages are data: none runs a script, reaches a network, or reads a file outside of the folder that it belongs to.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from PIL import Image

from swift_stage2.errors import UserError

if TYPE_CHECKING:  # an extra, which the other sources do without
    from playwright.sync_api import Browser, Request, Route

Edges = Sequence[float]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_DEADLINE_MS = 20_000
_ELEMENTS_MS = 20_000  # the browser knows no deadline for a script
_ARGUMENTS = (
    "--host-resolver-rules=MAP * ~NOTFOUND",  # for what is asked without a request, as a prefetch of names is
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # The same page gives the same bytes: no picture is still being decoded, none moves, and letters are grey.
    "--disable-checker-imaging",
    "--blink-settings=imageAnimationPolicy=2",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A page as a reader has it before them: a window of ``width`` x ``height`` pixels, ``share`` of the way down."""

    page: Path
    width: int
    height: int
    zoom: float
    """Pixels per CSS pixel, in quarters."""
    share: float


@dataclass(frozen=True, slots=True)
class SeenBox:
    """Edges x1, y1, x2, y2 in pixels: a box as it is laid out, and the part that is seen; None if that is covered."""

    label: str
    whole: Edges
    shown: Edges | None


@dataclass(frozen=True, slots=True)
class Shot:
    """The picture and, in the document's order, what it shows. ``has_frames``: also documents that were not asked."""

    image: Image.Image
    boxes: Sequence[SeenBox]
    has_frames: bool


class PageBrowser:
    """Shows pages below ``root``, which may load pictures and styles from there, and nothing else from anywhere."""

    def __init__(self, browser: Browser, root: Path) -> None:
        self._browser, self._root = browser, root.resolve()
        self._script = (files("swift_stage2.convert") / "page_elements.js").read_text(encoding="utf-8")

    def show(self, view: View) -> Shot:
        """The view of a page, always the same from the same browser.

        Raises:
            ValueError: the browser does not show it.
        """
        from playwright.sync_api import Error

        size = {"width": -int(-view.width // view.zoom), "height": -int(-view.height // view.zoom)}
        context = self._browser.new_context(
            viewport=size,  # type: ignore[arg-type]
            device_scale_factor=view.zoom,
            java_script_enabled=False,
            offline=True,
            service_workers="block",
            accept_downloads=False,
            reduced_motion="reduce",
        )
        try:
            context.set_default_timeout(_DEADLINE_MS)
            file = view.page.resolve()
            context.route("**/*", lambda route: self._answer(route, file))
            page = context.new_page()
            page.goto(file.as_uri())
            found = page.evaluate(self._script, [view.share, _ELEMENTS_MS])
            picture = page.screenshot(animations="disabled", scale="device")
        except Error as error:
            raise ValueError(str(error).splitlines()[0]) from error
        finally:
            context.close()
        with Image.open(io.BytesIO(picture)) as image:
            cropped = image.convert("RGB").crop((0, 0, view.width, view.height))
        return Shot(cropped, list(_boxes(found["elements"], view.zoom)), found["frames"])

    def _answer(self, route: Route, page: Path) -> None:
        if self._may_load(route.request, page):
            route.continue_()
        elif route.request.is_navigation_request():
            route.fulfill(status=204)  # no content: the page that would have been left stays
        else:
            route.abort()

    def _may_load(self, request: Request, page: Path) -> bool:
        """True of the page itself and of files below the folder, wherever links lead; of no further page."""
        url = urlsplit(request.url)
        if url.scheme == "data":
            return not request.is_navigation_request()
        if url.scheme != "file" or url.netloc:
            return False
        file = Path(os.path.realpath(unquote(url.path, errors="surrogateescape")))
        return file.is_relative_to(self._root) and (file == page or not request.is_navigation_request())


@contextmanager
def page_browser(root: Path) -> Iterator[PageBrowser]:
    """A browser for pages below ``root`` that ends with the block.

    Raises:
        UserError: there is none, or it does not start.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise UserError(
            "pages are shown by playwright, which is not installed; install swift-stage2[pages]"
        ) from error
    chromium = next(filter(None, map(shutil.which, _NAMES)), None)
    if chromium is None:
        raise UserError(
            f"pages are shown by Chromium, got none of {', '.join(_NAMES)} on PATH; apt-get install chromium"
        )
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=chromium,
                chromium_sandbox=os.geteuid() != 0,  # Chromium has none for root
                args=[*_ARGUMENTS],
                timeout=_DEADLINE_MS,
            )
        except Error as error:
            raise UserError(f"{chromium} must start, got {error}; start it by hand to see why") from error
        try:
            yield PageBrowser(browser, root)
        finally:
            browser.close()


def _boxes(elements: Sequence[Any], zoom: float) -> Iterator[SeenBox]:
    for element in elements:
        for box in element["boxes"]:
            whole, shown = (box[key] and [edge * zoom for edge in box[key]] for key in ("whole", "shown"))
            yield SeenBox(element["label"], whole, shown)
