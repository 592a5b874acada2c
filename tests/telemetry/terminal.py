"""A terminal that understands what rich sends, so that tests see what a user would see."""

from __future__ import annotations

import io
import re

_TOKEN = re.compile(r"\x1b\[\?25[lh]|\x1b\[(?P<number>\d*)(?P<move>[A-HJK])|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+")


class Terminal(io.StringIO):
    """A stream that is a terminal. ``screen()`` gives the lines as they stand after everything written."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for token in _TOKEN.finditer(self.getvalue()):
            text = token.group()
            if text == "\n":
                row, column = row + 1, 0
            elif text == "\r":
                column = 0
            elif token["move"] == "A":
                row = max(0, row - int(token["number"] or 1))
            elif token["move"] == "K":
                lines[row] = "" if token["number"] == "2" else lines[row][:column]
            elif not text.startswith("\x1b"):
                lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
                column += len(text)
            elif token["move"]:
                raise AssertionError(f"this terminal does not know {text!r}")
            lines += [""] * (row + 1 - len(lines))
        return [line.rstrip() for line in lines]
