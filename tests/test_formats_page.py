"""The tables of ``docs/design/formats.md`` are those of the code."""

from __future__ import annotations

from scripts import formats


def test_the_page_has_every_key_tag_and_event_as_the_code_declares_them() -> None:
    page = formats.PAGE.read_text(encoding="utf-8")
    assert formats.renewed(page) == page, "run python -m scripts.formats"


def test_every_key_and_kind_says_what_it_means() -> None:
    """A field without a sentence under it would leave a hole in the page."""
    rows = formats.tables()["keys"] + formats.tables()["tags"]
    assert [row for row in rows if row.startswith("|") and row.split("|")[-2].strip() == ""] == []
