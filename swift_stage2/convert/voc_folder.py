"""A folder of Pascal VOC's XML files as annotated images.

VOC counts pixels from 1, and a box ends with its last pixel: 1..W is the whole width, 0..W here. Many programs write
edges that count from 0 into the same format (``first_pixel=0``); nothing in a file says which, but a 0 gives it away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from swift_stage2.convert.annotated_image import AnnotatedImage, spell_label
from swift_stage2.convert.exact_numbers import Quad, are_coordinates, exact, subtracted
from swift_stage2.convert.folder_files import IMAGE_SUFFIXES, files_below
from swift_stage2.convert.tally import Oddity, Tally
from swift_stage2.whole_file import read_regular

_EDGES = ("xmin", "ymin", "xmax", "ymax")


class VocFolder:
    """``root`` and all folders in it.

    Raises:
        DatasetError: there is no XML file.
    """

    def __init__(
        self, root: Path, images: Path, tally: Tally, *, first_pixel: int = 1, skip_difficult: bool = False
    ) -> None:
        self._root, self._images, self._tally = root, images, tally
        self._first_pixel, self._skip_difficult = first_pixel, skip_difficult
        self._files = files_below(root, (".xml",), "SOURCE")

    def __len__(self) -> int:
        return len(self._files)

    def labels(self) -> Sequence[str]:
        """In alphabetical order: VOC has no list of classes, so all files are read for it."""
        silent = VocFolder(self._root, self._images, Tally())
        return sorted({label for image in silent for label, box in image.objects if box is not None})

    def __iter__(self) -> Iterator[AnnotatedImage]:
        seen: set[str] = set()
        for file in self._files:
            try:
                image = self._read(file)
            except (OSError, ValueError, LookupError, expat.ExpatError) as error:  # no such encoding
                self._tally.tell(Oddity.BROKEN_FILE, f"{file}: {error}")
                continue
            if image.name in seen:
                self._tally.tell(Oddity.SECOND, file)
                continue
            seen.add(image.name)
            yield image

    def _read(self, file: str) -> AnnotatedImage:
        root = _parse_xml(read_regular(self._root / file))
        if root.tag != "annotation":
            raise ValueError(f"the root must be <annotation>, got <{root.tag}>")
        objects = [self._object(thing, file) for thing in root.iterfind("object")]
        return AnnotatedImage(name=self._image_name(root, file), objects=objects, size=_size(root))

    def _object(self, thing: Element, file: str) -> tuple[str, Quad | None]:
        self._tally.num_annotations += 1
        written = (thing.findtext("name") or "").strip()
        if (label := spell_label(written)) != written:
            self._tally.tell(Oddity.RESPELT, f"{written} → {label}")
        box = self._box(thing, file) if label else None
        is_difficult = (thing.findtext("difficult") or "0").strip() not in ("0", "")
        if box is None:
            self._tally.tell(Oddity.NO_BOX if label else Oddity.NO_LABEL, file)
        elif is_difficult:
            self._tally.tell(Oddity.SKIPPED if self._skip_difficult else Oddity.DIFFICULT, file)
        return label, None if is_difficult and self._skip_difficult else box

    def _box(self, thing: Element, file: str) -> Quad | None:
        try:
            edges = [float(thing.findtext(f"bndbox/{edge}") or "") for edge in _EDGES]
        except ValueError:
            return None
        if not are_coordinates(edges, 4):
            return None
        if self._first_pixel and 0 in edges[:2]:
            self._tally.tell(Oddity.FROM_ZERO, file)
        x1, y1, x2, y2 = map(exact, edges)
        return subtracted(x1, exact(self._first_pixel)), subtracted(y1, exact(self._first_pixel)), x2, y2

    def _image_name(self, root: Element, file: str) -> str:
        """The picture that ``filename`` names, else the one of the XML file's own name; VOC knows them by that."""
        folder, stem = os.path.split(os.path.splitext(file)[0])
        named = (root.findtext("filename") or "").strip()
        names = [os.path.join(folder, named)] if named else []
        names += [named] if named and folder else []
        names += [os.path.join(folder, stem + suffix) for suffix in IMAGE_SUFFIXES]
        return next((name for name in names if os.path.lexists(self._images / name)), names[0])


def _size(root: Element) -> tuple[int, int] | None:
    sides = [root.findtext(f"size/{side}") or "" for side in ("width", "height")]
    try:
        width, height = map(int, sides)
    except ValueError:
        return None
    return (width, height) if width > 0 and height > 0 else None


def _parse_xml(content: bytes) -> Element:
    """The root, of text without entities of its own, which could stand for any amount of text.

    Raises:
        expat.ExpatError: it is no XML.
        ValueError: it declares an entity.
    """

    def refuse(*declaration: object) -> NoReturn:
        raise ValueError("a file of annotations must declare no entities")

    tree = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = tree.start
    parser.EndElementHandler = tree.end
    parser.CharacterDataHandler = tree.data
    parser.EntityDeclHandler = refuse
    parser.Parse(content, True)
    return tree.close()
