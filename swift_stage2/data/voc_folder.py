"""A folder of Pascal VOC's XML files as annotated images.

VOC counts pixels from 1, and a box ends with its last pixel: 1..W is the whole width, 0..W here. Many programs write
edges that count from 0 into the same format (``first_pixel=0``); nothing in a file says which, but a 0 gives it away.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    ImageFolder,
    ImportIssue,
    ImportReport,
    LabelSpelling,
    files_below,
    flag,
    numbers,
    size_of,
)
from swift_stage2.records import Box
from swift_stage2.whole_file import read_regular

_EDGES = ("xmin", "ymin", "xmax", "ymax")
_LINE = "line"


def read_voc(
    root: Path,
    report: ImportReport,
    folder: ImageFolder,
    *,
    first_pixel: int = 1,
    skip_difficult: bool = False,
) -> AnnotatedSet:
    """The files of ``root`` and all folders in it; labels in alphabetical order, for VOC has no list of classes.

    Raises:
        DatasetError: there is no XML file.
    """
    reader = _VocReader(report, folder, first_pixel, skip_difficult, LabelSpelling(report))
    claims: defaultdict[str, dict[str, AnnotatedImage]] = defaultdict(dict)
    for file in files_below(root, (".xml",), "SOURCE"):
        path = root / file
        try:
            image = reader.read(path, file)
        except (OSError, ValueError, LookupError, expat.ExpatError) as error:  # no such encoding
            report.add(ImportIssue.BROKEN_FILE, f"{path}: {error}")
            continue
        if image is not None:
            claims[image.name][str(path)] = image
    for name, files in claims.items():
        if len(files) > 1:
            report.add(ImportIssue.TWO_CLAIMS, f"{name}: {', '.join(files)}")
    images = [next(iter(files.values())) for files in claims.values() if len(files) == 1]
    return AnnotatedSet(images, sorted({each.label for image in images for each in image.objects}))


@dataclass(frozen=True, slots=True)
class _VocReader:
    report: ImportReport
    folder: ImageFolder
    first_pixel: int
    skip_difficult: bool
    spelling: LabelSpelling

    def read(self, path: Path, file: str) -> AnnotatedImage | None:
        root = _parse_xml(read_regular(path))
        if root.tag != "annotation":
            raise ValueError(f"the root must be <annotation>, got <{root.tag}>")
        found = (self._object(thing, f"{path}:{thing.get(_LINE)}") for thing in root.iterfind("object"))
        objects = [each for each in found if each is not None]
        if (name := self._picture(root, path, file)) is None:
            return None
        size = size_of(root.findtext("size/width"), root.findtext("size/height"))
        return AnnotatedImage(name=name, objects=objects, size=size)

    def _object(self, thing: Element, where: str) -> AnnotatedObject | None:
        self.report.num_annotations += 1
        label = self.spelling.spell((thing.findtext("name") or "").strip())
        if not label:
            self.report.add(ImportIssue.NO_CLASS, where)
        elif (box := self._box(thing, where)) is None:
            self.report.add(ImportIssue.NO_BOX, where)
        elif (is_difficult := flag(thing.findtext("difficult"))) is None:
            self.report.add(ImportIssue.BAD_FLAG, where)
        elif is_difficult and self.skip_difficult:
            self.report.add(ImportIssue.DIFFICULT, where)
        else:
            return AnnotatedObject(label, box, where)
        return None

    def _box(self, thing: Element, where: str) -> Box | None:
        edges = numbers([(thing.findtext(f"bndbox/{edge}") or "").strip() for edge in _EDGES], 4)
        if edges is None:
            return None
        x1, y1, x2, y2 = edges
        if self.first_pixel and 0 in (x1, y1):
            self.report.add(ImportIssue.FROM_ZERO, where)
        return x1 - self.first_pixel, y1 - self.first_pixel, x2, y2

    def _picture(self, root: Element, path: Path, file: str) -> str | None:
        """The picture that ``filename`` names, else the one of the XML file's own name; VOC knows them by that."""
        named, own = (root.findtext("filename") or "").strip(), os.path.splitext(file)[0]
        places = [os.path.join(os.path.dirname(file), named), named, own] if named else [own]
        unheard = ImportReport()
        found = (self.folder.find(place, str(path), unheard) for place in places)
        return next(filter(None, found), None) or self.folder.find(places[0], str(path), self.report)


def _parse_xml(content: bytes) -> Element:
    """The root; each element has the number of its line as an attribute. Raises expat.ExpatError: it is no XML."""

    def start(tag: str, attributes: dict[str, str]) -> None:
        tree.start(tag, attributes | {_LINE: str(parser.CurrentLineNumber)})

    tree, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, tree.end
    parser.CharacterDataHandler = tree.data
    parser.Parse(content, True)
    return tree.close()
