"""Web pages below a folder as annotated images: pictures are taken of them, and the document says where things are.

Which page, how large, how far down and at which zoom is drawn by a seed: the same folder, browser and fonts give the
same bytes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from swift_stage2.convert.annotated_image import AnnotatedImage
from swift_stage2.convert.exact_numbers import Quad, exact_quad
from swift_stage2.convert.folder_files import files_below
from swift_stage2.convert.page_browser import PageBrowser, SeenBox, View, page_browser
from swift_stage2.convert.tally import Oddity, Tally
from swift_stage2.errors import UserError
from swift_stage2.run_directory.claim import claim_directory

LABELS = ("link", "button", "image", "heading", "field")
SIDES = (448, 1288)
_MARKER = ".swift-stage2-pages"
_SUFFIXES = (".html", ".htm", ".xhtml")
_ZOOMS = (0.75, 1.0, 1.25, 1.5, 2.0)
_LEAST_SIDE = 4  # pixels that are seen of an element, both ways
_ENOUGH = 24  # or half of a shorter side

Pixels = tuple[int, int, int, int]


class PageFolder:
    """``num`` pictures of pages below ``root``, taken when this is made and written below the folder ``images``.

    With ``replaces`` pictures that an earlier one left there are removed once there is a page and a browser.
    ``sides``: a picture's width and height are drawn from the first to the second, in pixels.

    Raises:
        DatasetError: there is no page.
        UserError: there is no browser, or the folder holds something else, or such pictures and is not to be replaced.
        OSError: a picture cannot be written.
    """

    def __init__(
        self,
        root: Path,
        images: Path,
        tally: Tally,
        on_progress: Callable[[float], None] = lambda num_pictures: None,
        *,
        num: int,
        seed: int = 0,
        sides: tuple[int, int] = SIDES,
        replaces: bool = False,
    ) -> None:
        self._folder, self._tally = images, tally
        self._images: list[AnnotatedImage] = []
        names = files_below(root, _SUFFIXES, "SOURCE")
        random.Random(seed).shuffle(names)
        waiting = deque((name, 0) for name in names)  # a view of every page, then another one of each
        if (
            not replaces
            and (images / _MARKER).exists()
            and any(each.name != _MARKER for each in images.iterdir())
        ):
            raise UserError(
                f"--images must be a new folder, got {images} with the pictures of an earlier import, which its rows "
                "name; name another one, or replace them with --force"
            )
        with page_browser(root) as browser:
            claim_directory(images, keep=False, marker=_MARKER, option="--images")
            while waiting and len(self._images) < num:
                name, number = waiting.popleft()
                view = _drawn_view(root / name, random.Random(f"{seed}:{name}:{number}"), sides)
                if (image := self._take(browser, view, name, f"{name}.{number}.png")) is not None:
                    self._images.append(image)
                    waiting.append((name, number + 1))
                    on_progress(len(self._images))

    def labels(self) -> Sequence[str]:
        """All that an element can be, whether or not a page shows one."""
        return LABELS

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[AnnotatedImage]:
        return iter(self._images)

    def _take(self, browser: PageBrowser, view: View, page: str, name: str) -> AnnotatedImage | None:
        """One picture, written; None of a page that gives none."""
        try:
            shot = browser.show(view)
        except ValueError as error:
            self._tally.tell(Oddity.BROKEN_PAGE, f"{page}: {error}")
            return None
        if shot.has_frames:
            self._tally.tell(Oddity.FRAMED, page)
            return None
        objects: list[tuple[str, Quad | None]] = []
        self._tally.num_annotations += len(shot.boxes)
        for box in shot.boxes:
            if (pixels := seen_pixels(box, shot.image)) is None:
                self._tally.tell(Oddity.UNSEEN, name)
            objects.append((box.label, exact_quad(pixels) if pixels else None))
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shot.image.save(path)
        return AnnotatedImage(name=name, objects=objects, size=shot.image.size, group=page)


def _drawn_view(page: Path, chance: random.Random, sides: tuple[int, int]) -> View:
    return View(
        page=page,
        width=chance.randint(*sides),
        height=chance.randint(*sides),
        zoom=chance.choice(_ZOOMS),
        share=max(0.0, chance.uniform(-0.5, 1.0)),  # a third of all are of the top
    )


def seen_pixels(box: SeenBox, image: Image.Image) -> Pixels | None:
    """The part of a box that the picture shows, in whole pixels as Chromium snaps them; None where nothing can be seen.

    That is one that is covered, one that an edge leaves less than half of (or 24 pixels of a longer side), one of
    fewer than 4 pixels, and one that is all of one colour.
    """
    if box.shown is None:
        return None
    width, height = image.size
    x1, y1, x2, y2 = (math.floor(edge + 0.5) for edge in box.shown)
    x1, y1, x2, y2 = max(x1, 0), max(y1, 0), min(x2, width), min(y2, height)
    for side, whole in ((x2 - x1, box.whole[2] - box.whole[0]), (y2 - y1, box.whole[3] - box.whole[1])):
        if side < _LEAST_SIDE or side < min(whole / 2, _ENOUGH):
            return None
    extremes = image.crop((x1, y1, x2, y2)).getextrema()
    if all(least == most for least, most in extremes):  # type: ignore[misc]
        return None
    return x1, y1, x2, y2
