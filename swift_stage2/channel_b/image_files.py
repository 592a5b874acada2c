"""Where the images of a row lie and which pixels they are: the one rule for who sends them and who looks at them.

Pixels are taken as they are stored. An EXIF orientation changes nothing here or in ms-swift, but some servers turn
pictures by it, so it is taken out of what they are sent.
"""

from __future__ import annotations

import io

from PIL import ExifTags, Image

RASTER_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""None that runs another program."""
UPRIGHT = 1
_TAGS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # where Pillow looks for an orientation
_MARKS = (b"Exif", b"eXIf", b"exif", b"EXIF", b"tiff:Orientation")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; ``UPRIGHT`` where there is none that means anything. Decodes no pixels."""
    if image.format == "PNG" and not any(tag in image.info for tag in _TAGS):
        return UPRIGHT  # Pillow would decode it to look behind its pixels
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except (OSError, ValueError, SyntaxError, KeyError):  # a damaged tag turns no picture
        return UPRIGHT
    return value if isinstance(value, int) and UPRIGHT <= value <= 8 else UPRIGHT


def without_orientation(content: bytes) -> bytes:
    """An image file whose pixels nobody will turn: ``content`` itself, or its stored pixels as a PNG without the tag.

    What is no image that can be read is left as it is: what becomes of it is the server's to say.
    """
    if not any(mark in content for mark in _MARKS):
        return content
    try:
        with Image.open(io.BytesIO(content), formats=RASTER_FORMATS) as image:
            if image.format == "PNG" and b"eXIf" in content:
                image.load()  # the tag may stand behind the pixels
            if orientation_of(image) == UPRIGHT:
                return content
            pixels = image.copy() if image.mode in _PNG_MODES else image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return content
    for tag in _TAGS:
        pixels.info.pop(tag, None)
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
