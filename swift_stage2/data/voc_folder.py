"""A folder of Pascal VOC's XML files as annotated images.

VOC counts pixels from 1, and a box ends with its last pixel: 1..W is the whole width, 0..W here. Many programs write
edges that count from 0 into the same format (``first_pixel=0``); nothing in a file says which, but a 0 gives it away.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from swift_stage2.data.import_report import ImportIssue, ImportReport
from swift_stage2.data.sources import (
    AnnotatedImage,
    AnnotatedObject,
    ImageFolder,
    LabelSpelling,
    files_below,
    flag,
    in_order,
    numbers,
    stem_of,
    whole,
)
from swift_stage2.records import Box
from swift_stage2.whole_file import read_regular

_EDGES = ("xmin", "ymin", "xmax", "ymax")
_LINE = "line"


class VocFolder:
    """``root`` and all folders in it, which are read when this is made.

    Raises:
        DatasetError: there is no XML file.
    """

    def __init__(
        self,
        root: Path,
        report: ImportReport,
        folder: ImageFolder,
        *,
        first_pixel: int = 1,
        skip_difficult: bool = False,
    ) -> None:
        self._report, self._folder = report, folder
        self._first_pixel, self._skip_difficult = first_pixel, skip_difficult
        self._spelling = LabelSpelling(report)
        claims: defaultdict[str, dict[str, AnnotatedImage]] = defaultdict(dict)
        for file in files_below(root, (".xml",), "SOURCE"):
            path = root / file
            try:
                image = self._read(path, file)
            except (OSError, ValueError, LookupError, expat.ExpatError) as error:  # no such encoding
                report.add(ImportIssue.BROKEN_FILE, f"{path}: {error}")
                continue
            if image is not None:
                claims[image.name][str(path)] = image
        self._images = [next(iter(files.values())) for files in claims.values() if len(files) == 1]
        for name, files in claims.items():
            if len(files) > 1:
                report.add(ImportIssue.TWO_CLAIMS, f"{name}: {', '.join(files)}")

    def __len__(self) -> int:
        return len(self._images)

    def labels(self) -> Sequence[str]:
        """In alphabetical order: VOC has no list of classes."""
        return sorted({each.label for image in self._images for each in image.objects})

    def __iter__(self) -> Iterator[AnnotatedImage]:
        return iter(self._images)

    def _read(self, path: Path, file: str) -> AnnotatedImage | None:
        root = _parse_xml(read_regular(path))
        if root.tag != "annotation":
            raise ValueError(f"the root must be <annotation>, got <{root.tag}>")
        found = (self._object(thing, f"{path}:{thing.get(_LINE)}") for thing in root.iterfind("object"))
        objects = [each for each in found if each is not None]
        if (name := self._picture(root, path, file)) is None:
            return None
        sides = [whole(root.findtext(f"size/{side}")) or 0 for side in ("width", "height")]
        size = (sides[0], sides[1]) if min(sides) > 0 else None
        return AnnotatedImage(name=name, objects=objects, size=size)

    def _object(self, thing: Element, where: str) -> AnnotatedObject | None:
        self._report.num_annotations += 1
        label = self._spelling.spell((thing.findtext("name") or "").strip())
        if not label:
            self._report.add(ImportIssue.NO_LABEL, where)
        elif (box := self._box(thing, where)) is None:
            self._report.add(ImportIssue.NO_BOX, where)
        elif (is_difficult := flag(thing.findtext("difficult"))) is None:
            self._report.add(ImportIssue.BAD_FLAG, where)
        elif is_difficult and self._skip_difficult:
            self._report.add(ImportIssue.SKIPPED, where)
        else:
            if is_difficult:
                self._report.add(ImportIssue.DIFFICULT, where)
            return AnnotatedObject(label, box, where)
        return None

    def _box(self, thing: Element, where: str) -> Box | None:
        edges = numbers([(thing.findtext(f"bndbox/{edge}") or "").strip() for edge in _EDGES])
        if edges is None or len(edges) != len(_EDGES):
            return None
        if self._first_pixel and 0 in edges[:2]:
            self._report.add(ImportIssue.FROM_ZERO, where)
        x1, y1, x2, y2 = in_order(edges, where, self._report)
        return x1 - self._first_pixel, y1 - self._first_pixel, x2, y2

    def _picture(self, root: Element, path: Path, file: str) -> str | None:
        """The picture that ``filename`` names, else the one of the XML file's own name; VOC knows them by that."""
        folder, named = os.path.dirname(file), (root.findtext("filename") or "").strip()
        places = [os.path.join(folder, named), named] if named else []
        own = os.path.splitext(file)[0]
        unheard = ImportReport()
        for place in dict.fromkeys((*places, own)):
            name = self._folder.find(place, str(path), unheard)
            if name is not None:
                if named and place == own and os.path.basename(stem_of(named)) != os.path.basename(own):
                    self._report.add(ImportIssue.OTHER_NAME, f"{path}: {named}, taken for {name}")
                return name
        return self._folder.find(places[0] if places else own, str(path), self._report)


def _parse_xml(content: bytes) -> Element:
    """The root; each element has the number of its line as an attribute. Raises expat.ExpatError: it is no XML."""

    def start(tag: str, attributes: dict[str, str]) -> None:
        tree.start(tag, attributes | {_LINE: str(parser.CurrentLineNumber)})

    tree, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, tree.end
    parser.CharacterDataHandler = tree.data
    parser.Parse(content, True)
    return tree.close()
