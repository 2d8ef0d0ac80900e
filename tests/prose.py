"""English of what people read: README, docs, help of commands, the report's page. ``python -m tests.prose`` lists faults.

A sentence has at most `MOST_WORDS` words between two of its stops, semicolons and colons; words of `WORDS` have better ones.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30
WORDS = {
    r"\bst(?:ands?|anding|ood) still\b": "stall",
    r"\bfor want of\b": "without, where there is no",
    r"\bat hand\b": "available",
    r"\bbeside\b": "next to, with, besides",
    r"\banew\b": "again",
    r"\bunder way\b": "in flight, in progress",
    r"\b(?:is|are) told\b": "gets, reads",
    r"\bso many\b": "the number itself: N, the first N",
    r"(?<!there )\b(?:is|are) no (?!more\b|less\b|longer\b|better\b|worse\b)": "is not a",
    r"\bhidden under nothing\b": "exposed",
    r"\butili[sz]e": "use",
    r"\bin order to\b": "to",
    r"\bvery\b": "the number, or nothing",
}
_STOP = re.compile(r"(?<=[.!?:;])\)?\s+(?=[A-Za-z\"'*(\d])")
_WORD = re.compile(r"[\w'’-]*\w[\w'’.,%-]*")


def paragraphs(markdown: str) -> Iterator[str]:
    """Running text of a page, without code, tables, headings, links' targets and pictures."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", markdown, flags=re.DOTALL)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        item = re.match(r"\s*(?:[*-]|\d+\.)\s", line)
        if item or not line.strip() or line.startswith(("    ", "|", "#", ">", "(")):
            if lines:
                yield _plain(" ".join(lines))
            lines = []
            line = line[item.end() :] if item else ""
        if line.strip():
            lines.append(line.strip())


def _plain(text: str) -> str:
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", re.sub(r"`[^`]*`", "Code", text))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def help_texts() -> Iterator[tuple[str, str]]:
    """Place and text of every command's help, and of its options."""
    from foremoe.cli.main import COMMANDS, main

    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        yield f"foremoe {name} --help", _plain(" ".join((command.help or "").partition("\b")[0].split()))
        for param in command.params:
            # Lists of names in brackets and after colons are no sentences.
            if isinstance(param, click.Option) and param.help:
                yield f"foremoe {name} {param.opts[0]}", _plain(re.sub(r"\[default:.*?\]", "", param.help))


def page_texts() -> Iterator[tuple[str, str]]:
    """Texts that stand in the report's page."""
    path, tags = ROOT / "foremoe" / "report" / "page" / "page.html", "(?:p|h2|figcaption|label)"
    for text in re.findall(rf"<{tags}\b[^>]*>([^{{]*?)</{tags}>", path.read_text(), re.DOTALL):
        yield path.name, html.unescape(re.sub(r"<[^>]*>", "", " ".join(text.split())))


def texts() -> Iterator[tuple[str, str]]:
    """Place and text of everything that is read."""
    for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name != "CHANGELOG.md":
            for text in paragraphs(page.read_text()):
                yield page.relative_to(ROOT).as_posix(), text
    yield from help_texts()
    yield from page_texts()


def faults(text: str) -> Iterator[str]:
    """What is to mend in a paragraph."""
    for part in _STOP.split(text):
        count = len(_WORD.findall(part))
        if count > MOST_WORDS:
            yield f"{count} words, at most {MOST_WORDS}: {part}"
    for pattern, better in WORDS.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{found[0]!r}, better {better}: ...{text[max(found.start() - 40, 0) : found.end() + 40]}..."


def main() -> int:
    """Prints every fault; 1 if there is one."""
    found = [f"{place}: {fault}" for place, text in texts() for fault in faults(text)]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
