"""Cuts program text into tokens with one compiled regular expression, and says where in the text something is wrong."""

from __future__ import annotations

import re
from typing import NoReturn

from ..errors import ParseError

MAX_NESTING = 100  # regions within regions, attributes within attributes

_TOKEN = re.compile(
    r"""(?>(?:[ \t\r\n]+|//[^\n]*)*)(?:
    (%(?:[0-9]+|[A-Za-z$._\-][A-Za-z0-9$._\-]*)(?:\#[0-9]+)?)                   # 1 value
    |(->|[(){}\[\]<>=:,?*+\-])                                                  # 2 punctuation, '-' also of a number
    |("[^"\\\n]*(?:\\[^\n][^"\\\n]*)*")                                         # 3 string
    |(tensor<(?:[0-9]+x)*(?:complex<[a-z0-9]+>|[a-z][A-Za-z0-9]*)>)             # 4 tensor type
    |([A-Za-z_][A-Za-z0-9_$.]*)                                                 # 5 bare identifier
    |(0x[0-9A-Fa-f]+|[0-9]+(?:\.[0-9]*(?:[eE][+\-]?[0-9]+)?)?)                  # 6 number
    |([!\#@^](?:[A-Za-z0-9_$.\-]+|"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"))            # 7 type, attribute, symbol, block
    |(\Z)                                                                       # 8 end
    )""",
    re.VERBOSE | re.ASCII,
)
VALUE, PUNCTUATION, STRING, TENSOR, WORD, NUMBER, SIGIL, END = range(1, 9)
_SPACE = re.compile(r"(?>(?:[ \t\r\n]+|//[^\n]*)*)")


class Tokens:
    """The current token of a text: its kind, its text and where it ends."""

    def __init__(self, text: str, filename: str):
        self.text, self.filename = text, filename
        self.match = _TOKEN.match
        self.end = 0
        self.kind = END
        self.token = ""
        self.advance()

    def advance(self) -> None:
        found = self.match(self.text, self.end)
        if found is None:
            self.bad_character()
        self.kind = kind = found.lastindex or END
        self.token = found[kind]
        self.end = found.end()

    @property
    def start(self) -> int:
        return self.end - len(self.token)

    def bad_character(self) -> NoReturn:
        text = self.text
        space = _SPACE.match(text, self.end)
        position = space.end() if space else self.end
        if text[position] == '"':
            self.fail("this string is not closed on its line", position)
        if text.startswith("//", position):
            position = len(text)
        self.fail(f"unexpected character {text[position]!r}" if position < len(text) else "unexpected end", position)

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        if position is None:
            position = self.start
        line, column, source = self.place(position)
        raise ParseError(message, self.filename, line, column, source)

    def place(self, position: int) -> tuple[int, int, str]:
        """Line, column and source line of a position."""
        begin = self.text.rfind("\n", 0, position) + 1
        finish = self.text.find("\n", position)
        source = self.text[begin : finish if finish >= 0 else len(self.text)]
        return self.text.count("\n", 0, position) + 1, position - begin + 1, source

    def seen(self) -> str:
        """The current token, for messages."""
        return f"found {self.token!r}" if self.kind != END else "the text ends here"

    def expect(self, token: str, where: str) -> None:
        if self.token != token or self.kind != PUNCTUATION:
            self.fail(f"expected '{token}' {where}, {self.seen()}")
        self.advance()

    def accept(self, token: str) -> bool:
        if self.token == token and self.kind == PUNCTUATION:
            self.advance()
            return True
        return False

    def seek(self, position: int) -> None:
        """Goes on reading at a position of the text."""
        self.end = position
        self.advance()
