"""Pages in: boxes are where the pixels are, and a page is data, which reaches nothing and runs nothing."""

from __future__ import annotations

import http.server
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_sources import Importer
from PIL import Image

from swift_stage2.convert import import_command, page_browser
from swift_stage2.convert.page_browser import SeenBox, View
from swift_stage2.convert.page_folder import seen_pixels
from swift_stage2.convert.tally import Oddity
from swift_stage2.errors import DatasetError, UserError

browser = pytest.mark.browser

# Each element is the only one of its colour.
COLOURS = {
    "link": [(250, 0, 0), (250, 60, 0), (250, 120, 0)],
    "button": [(0, 250, 0), (60, 250, 0), (120, 250, 0)],
    "heading": [(0, 0, 250), (60, 0, 250)],
    "field": [(250, 0, 250), (250, 60, 250), (250, 120, 250)],
    "image": [(0, 250, 250), (60, 250, 250)],
}
DOCUMENT = """<!DOCTYPE html><meta charset="utf-8"><title>a</title>
<style>
body {{ margin: 7px; font: 14px sans-serif; }}
button, input, textarea {{ border: 0; border-radius: 0; margin: 3px; appearance: none; }}
a {{ box-decoration-break: clone; }}
svg, canvas {{ margin: 5px 9px; }}
h1, h2 {{ font-size: 20px; }}
</style>
{body}
"""


def coloured(label: str, number: int) -> str:
    """Without a line below a link's text, so that every edge shows paint."""
    colour = "background: rgb({}, {}, {})".format(*COLOURS[label][number])
    return f"{colour}; text-decoration: none" + ("" if label == "heading" else "; padding: 3px")


def element(label: str, number: int) -> str:
    """One that paints all of its box, and nothing outside, in its colour; a heading's box is that of its text."""
    style = coloured(label, number)
    if label == "link":
        return f'<a href="x.html" style="{style}">link</a> and some words that follow on the link'
    if label == "button":
        return [
            f'<button style="{style}"><b>button</b></button>',
            f'<input type="submit" value="button" style="{style}">',
            f'<div role="button" style="display: inline-block; {style}">button</div>',
        ][number]
    if label == "heading":
        return f'<h{number + 1}><span style="{style}">heading</span></h{number + 1}>'
    if label == "field":
        return [
            f'<input value="field" style="{style}">',
            f'<textarea style="{style}; resize: none">field</textarea>',
            f'<div contenteditable style="display: inline-block; {style}">field</div>',
        ][number]
    fill = "rgb({}, {}, {})".format(*COLOURS[label][number])
    drawn = f"<rect x='-9' y='-9' width='99' height='99' fill='{fill}'/><circle cx='30' cy='20' r='5' fill='black'/>"
    if number == 0:
        return f'<svg width="61" height="43" style="display: inline-block">{drawn}</svg>'
    data = f"<svg xmlns='http://www.w3.org/2000/svg' width='61' height='43'>{drawn}</svg>"
    return f'<img src="data:image/svg+xml,{data.replace("#", "%23")}">'


def write_page(folder: Path, body: str, name: str = "a.html") -> Path:
    path = folder / "pages" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DOCUMENT.format(body=body), encoding="utf-8")
    return folder / "pages"


def extent(image: Image.Image, colour: tuple[int, int, int]) -> tuple[float, ...] | None:
    """The edges of all that has a colour on white paper; None if nothing has it.

    A pixel that an edge runs through is as much lighter as less of it is covered.
    """
    pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((pixels == colour).all(-1))
    if not len(rows):
        return None
    x1, y1, x2, y2 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    channel = int(np.argmin(colour))
    share = np.pad((255 - pixels[..., channel]) / (255 - colour[channel]), 1)  # 0 beyond the picture

    def covered(strip: np.ndarray[Any, Any]) -> float:
        return float(min(np.median(strip), 1))

    return (
        x1 - covered(share[y1 + 1 : y2 + 1, x1]),
        y1 - covered(share[y1, x1 + 1 : x2 + 1]),
        x2 + covered(share[y1 + 1 : y2 + 1, x2 + 1]),
        y2 + covered(share[y2 + 1, x1 + 1 : x2 + 1]),
    )


def agree(told: list[float], true: tuple[float, ...]) -> bool:
    """Whether whole pixels are the nearest ones to edges, which are known to a hundredth."""
    return max(abs(one - other) for one, other in zip(told, true, strict=True)) <= 0.51


@browser
def test_boxes_are_where_the_pixels_are(tmp_path: Path, run_import: Importer) -> None:
    """At every zoom and wherever the window is: each element has a colour of its own to look for in the picture."""
    parts = [element(label, number) for label, colours in COLOURS.items() for number in range(len(colours))]
    spaced = [f"<p style='margin: {5 + 3 * n}px {n}px'>{part}</p>" for n, part in enumerate(parts)]
    found = run_import("pages", write_page(tmp_path, "\n".join(spaced)), "--num", "6", "--sides", "160-520")
    seen = Counter[str]()
    for row in found.rows:
        with Image.open(row["images"][0]) as image:
            assert all(160 <= side <= 520 for side in image.size)
            objects = list(zip(row["objects"]["ref"], row["objects"]["bbox"], strict=True))
            for label, colours in COLOURS.items():
                true = [edges for colour in colours if (edges := extent(image, colour))]
                told = [box for each, box in objects if each == label]
                whole = [edges for edges in true if edges[1] > 0 and edges[3] < image.height]
                assert [edges for edges in whole if not any(agree(box, edges) for box in told)] == []
                assert [box for box in told if not any(agree(box, edges) for edges in true)] == []
                seen[label] += len(told)
    assert min(seen[label] for label in COLOURS) >= 2, seen


@pytest.mark.slow
@browser
def test_a_link_that_breaks_has_a_box_for_each_line(tmp_path: Path, run_import: Importer) -> None:
    """Lines are pieces of one colour with rows of paper between them."""
    words = " ".join(["word"] * 40)
    source = write_page(
        tmp_path, f'<p style="line-height: 3">So <a href="#" style="{coloured("link", 0)}">{words}</a>.'
    )
    found = run_import("pages", source, "--num", "3", "--sides", "300-400")
    for row in found.rows:
        boxes = row["objects"]["bbox"]
        with Image.open(row["images"][0]) as image:
            is_link = (np.asarray(image.convert("RGB")) == COLOURS["link"][0]).all(-1).any(1)
            tops = np.flatnonzero(np.diff(is_link.astype(int), prepend=0) == 1).tolist()
            assert len(tops) > 2
            assert len(boxes) in (len(tops), len(tops) - 1)  # the last one may be cut
            ends = [*(top - 4 for top in tops[1:]), image.height]
            for top, end, (x1, y1, x2, y2) in zip(tops, ends, boxes, strict=False):
                line = Image.new("RGB", image.size, "white")
                line.paste(image.crop((0, top - 2, image.width, end)), (0, top - 2))
                edges = extent(line, COLOURS["link"][0])
                assert edges is not None
                assert y2 == image.height or agree([x1, y1, x2, y2], edges)


NOT_SHOWN = {
    "not displayed": '<a href="#" style="display: none">link</a>',
    "hidden": '<a href="#" style="visibility: hidden">link</a>',
    "transparent": '<div style="opacity: 0"><button>button</button></div>',
    "without text": '<a href="#"></a><h1> </h1>',
    "no link": '<a name="here">anchor</a>',
    "hidden field": '<input type="hidden" value="1">',
    "not there": '<img src="gone.png" width="80" height="60" alt="">',
    "beside the window": '<a href="#" style="position: absolute; left: -900px">link</a>',
    "cut off": '<div style="height: 0; overflow: hidden"><a href="#">link</a></div>',
}
DROPPED = {
    "under another": '<a href="#">link</a><div style="position: fixed; inset: 0; background: white"></div>',
    "in the paper's colour": '<a href="#" style="color: white">link</a>',
    "cut to a sliver": '<div style="height: 3px; overflow: hidden"><a href="#">link</a></div>',
}
KEPT = {
    "under glass": '<a href="#">link</a><div style="position: fixed; inset: 0"></div>',
    "no pointer may reach it": '<a href="#" style="pointer-events: none">link</a>',
    "out of its container's flow": '<div style="height: 0; overflow: hidden"><a href="#" style="position: absolute">'
    "link</a></div>",
    "a script would hide it": '<a href="#">link</a><script>document.body.remove()</script>',
    "a picture in a link": '<a href="#"><svg width="30" height="30"><circle cx="9" cy="9" r="5"/></svg></a>',
    "an icon in a button": '<button><svg width="30" height="30"><circle cx="9" cy="9" r="5"/></svg></button>',
    "about to appear": "<style>@keyframes in { from { opacity: 0 } }</style>"
    '<a href="#" style="animation: in 9s">link</a>',
}


@browser
@pytest.mark.slow
def test_only_what_is_seen_has_a_box(tmp_path: Path, run_import: Importer) -> None:
    cases = NOT_SHOWN | DROPPED | KEPT
    for name, body in cases.items():
        source = write_page(tmp_path, body, f"{name}.html")
    found = run_import("pages", source, "--num", str(len(cases)), "--sides", "200")
    told = {name: [label for label, _ in found.of(f"{name}.html.0.png")] for name in cases}
    expected = {name: [] for name in NOT_SHOWN | DROPPED}
    expected |= {name: ["link"] for name in KEPT} | {
        "a picture in a link": ["image"],
        "an icon in a button": ["button"],
    }
    assert told == expected
    assert found.counts() == {
        Oddity.EMPTY.found: len(NOT_SHOWN | DROPPED),
        Oddity.UNSEEN.found: len(DROPPED),
    }


@pytest.mark.slow
@browser
def test_a_page_of_more_elements_than_there_is_time_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_page(tmp_path, "<button>b</button>" * 20_000)
    view = View(page=page, width=400, height=400, zoom=1.0, share=0.0)
    with page_browser.page_browser(tmp_path) as opened:
        assert opened.show(view).boxes
        monkeypatch.setattr(page_browser, "_ELEMENTS_MS", 1)
        with pytest.raises(ValueError, match=r"its elements must be found in 0\.001 s"):
            opened.show(view)


@browser
@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, run_import: Importer) -> None:
    for number in range(4):
        source = write_page(
            tmp_path, element("link", 0) + element("button", 1) + "<p>text" * 99, f"{number}.html"
        )
    options = ("--num", "6", "--sides", "120-300", "--split", "0.4", "--seed")

    def taken(seed: str) -> dict[str, bytes]:
        found = run_import("pages", source, *options, seed)
        files = [found.path, found.path.with_name("train.val.jsonl"), *(tmp_path / "images").rglob("*.png")]
        return {file.name: file.read_bytes() for file in files}

    first = taken("1")
    assert first == taken("1")
    assert len(first) == 8
    assert first != taken("2")


@browser
@pytest.mark.slow
def test_a_page_stays_on_one_side_of_the_split(tmp_path: Path, run_import: Importer) -> None:
    for number in range(6):
        source = write_page(tmp_path, "<h1>heading</h1>", f"part/{number}.html")
    found = run_import("pages", source, "--num", "12", "--sides", "100", "--split", "0.5")
    sides = [
        {line.split('"images": ["')[1].split(".html.")[0] for line in path.read_text().splitlines()}
        for path in (found.path, found.path.with_name("train.val.jsonl"))
    ]
    assert len(sides[0]) + len(sides[1]) == len(sides[0] | sides[1]) == 6


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """A real server on loopback: its address, and the paths that anybody asked it for."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join(10)


@browser
def test_a_page_reaches_nothing_and_runs_nothing(
    tmp_path: Path, run_import: Importer, asked: tuple[str, list[str]]
) -> None:
    """Neither a server nor a file beside its folder, nor one that a link in the folder leads to."""
    address, paths = asked
    secret, ours = (200, 10, 90), (10, 90, 200)
    Image.new("RGB", (40, 40), secret).save(tmp_path / "secret.png")
    (tmp_path / "pages").mkdir()
    Image.new("RGB", (40, 40), ours).save(tmp_path / "pages" / "ours.png")
    (tmp_path / "pages" / "led.png").symlink_to(tmp_path / "secret.png")
    attempts = f"""
        <style>@import "{address}/style"; body {{ background: url({address}/background) }}
        @font-face {{ font-family: f; src: url({address}/font) }} a {{ font-family: f }}</style>
        <link rel="dns-prefetch" href="{address}"><link rel="preconnect" href="{address}">
        <link rel="prefetch" href="{address}/prefetch"><link rel="preload" as="image" href="{address}/preload">
        <meta http-equiv="refresh" content="0; url={address}/refresh">
        <script>fetch("{address}/fetch"); document.title = "run"; document.write("<h1>run</h1>")</script>
        <script src="{address}/script"></script>
        <img src="{address}/image"><img src="//{address[7:]}/image"><audio src="{address}/audio" autoplay></audio>
        <img src="../secret.png"><img src="led.png"><img src="file://{tmp_path}/secret.png"><img src="ours.png">
        <body onload="document.body.remove()"><a href="#" ping="{address}/ping">link</a>"""
    source = write_page(tmp_path, attempts)
    framed = (
        f'<iframe src="{address}/frame"></iframe><iframe src="../secret.png"></iframe><a href="#">link</a>'
    )
    write_page(tmp_path, framed, "framed.html")
    write_page(
        tmp_path, '<meta http-equiv="refresh" content="0; url=a.html">' + "<p>text" * 9, "leads away.html"
    )
    (tmp_path / "pages" / "away.html").symlink_to(tmp_path / "secret.html")
    (tmp_path / "secret.html").write_text("<h1>secret</h1>")
    found = run_import("pages", source, "--num", "4", "--sides", "400")
    assert paths == []
    assert sorted(label for label, _ in found.of("a.html.0.png")) == ["image", "link"]
    with Image.open(tmp_path / "images" / "a.html.0.png") as image:
        assert extent(image, secret) is None
        assert extent(image, ours) is not None
    assert found.of("leads away.html.0.png") == []
    assert found.counts()[Oddity.BROKEN_PAGE.found] == 1
    assert found.counts()[Oddity.FRAMED.found] == 1


def picture(colour: str = "white") -> Image.Image:
    """Of 100 x 60 pixels, with a spot on each tenth."""
    image = Image.new("RGB", (100, 60), colour)
    for x in range(0, 100, 10):
        for y in range(0, 60, 10):
            image.putpixel((x, y), (0, 0, 0))
    return image


@pytest.mark.parametrize(
    ("whole", "shown", "pixels"),
    [
        ((1.5, 2.4, 30.5, 20.6), (1.5, 2.4, 30.5, 20.6), (2, 2, 31, 21)),
        ((0, 0, 30, 20), None, None),
        ((90, 0, 120, 20), (90, 0, 100, 20), None),  # a third of it is less than half, and than 24 pixels
        ((76, 0, 200, 20), (76, 0, 100, 20), (76, 0, 100, 20)),
        ((85, 0, 110, 20), (85, 0, 100, 20), (85, 0, 100, 20)),
        ((0, 50, 30, 71), (0, 50, 30, 60), None),
        ((0, 0, 30, 3.4), (0, 0, 30, 3.4), None),
        ((11, 11, 19, 19), (11, 11, 19, 19), None),  # blank
        ((10, 11, 19, 19), (10, 11, 19, 19), None),
        ((10, 10, 19, 19), (10, 10, 19, 19), (10, 10, 19, 19)),
    ],
)
def test_a_box_is_dropped_if_too_little_of_it_is_seen(
    whole: tuple[float, ...], shown: tuple[float, ...] | None, pixels: tuple[int, ...] | None
) -> None:
    assert seen_pixels(SeenBox("link", whole, shown), picture()) == pixels  # type: ignore[arg-type]


def test_a_machine_without_a_browser_is_told_so(
    tmp_path: Path, run_import: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_page(tmp_path, "<h1>heading</h1>")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"got none of chromium, .* on PATH"):
        run_import("pages", source, "--num", "1")
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    with pytest.raises(UserError, match=r"install swift-stage2\[pages\]"):
        run_import("pages", source, "--num", "1")


@browser
def test_pictures_of_others_stay(tmp_path: Path, run_import: Importer) -> None:
    source = write_page(tmp_path, "<h1>heading</h1>")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.png").touch()
    with pytest.raises(UserError, match="--images must be a new directory"):
        run_import("pages", source, "--num", "1")
    assert [file.name for file in (tmp_path / "images").iterdir()] == ["mine.png"]


def test_a_folder_without_pages_is_refused(tmp_path: Path, run_import: Importer) -> None:
    (tmp_path / "pages").mkdir()
    with pytest.raises(UserError, match=r"SOURCE must be a folder that holds \.html"):
        run_import("pages", tmp_path / "pages", "--num", "1")


@browser
@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ("no-pages", [], DatasetError),
        ("pages", ["--prompt", "Detect {label}."], UserError),
        ("pages", ["--prompt", "<bbox>"], UserError),
    ],
)
def test_a_refused_import_leaves_the_pictures_of_an_earlier_one(
    tmp_path: Path, run_import: Importer, source: str, options: list[str], error: type[Exception]
) -> None:
    write_page(tmp_path, "<h1>heading</h1>")
    run_import("pages", tmp_path / "pages", "--num", "1", "--sides", "200")
    before = {path: path.read_bytes() for path in (tmp_path / "images").rglob("*.png")}
    assert before
    (tmp_path / "no-pages").mkdir()
    with pytest.raises(error):
        run_import("pages", tmp_path / source, "--num", "1", *options)
    assert {path: path.read_bytes() for path in (tmp_path / "images").rglob("*.png")} == before


@browser
def test_pictures_that_the_rows_of_another_import_name_are_replaced_with_force_only(
    tmp_path: Path, run_import: Importer
) -> None:
    source = write_page(tmp_path, "<h1>heading</h1>")
    run_import("pages", source, "--num", "1", "--sides", "200")
    before = {path: path.read_bytes() for path in (tmp_path / "images").rglob("*.png")}
    argv = ["pages", str(source), "--images", str(tmp_path / "images"), "--num", "1", "--sides", "300"]
    with pytest.raises(
        UserError, match=r"got .*/images with the pictures of an earlier import, which its rows name"
    ):
        import_command.main([*argv, "--output", str(tmp_path / "other.jsonl")])
    assert {path: path.read_bytes() for path in (tmp_path / "images").rglob("*.png")} == before
    assert not (tmp_path / "other.jsonl").exists()
