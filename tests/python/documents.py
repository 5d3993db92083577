"""The documents as tests read and run them: blocks, tables and sentences.

A module that tests import from: PYTEST_DONT_REWRITE, or pytest warns.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted(str(p.relative_to(REPO)) for p in REPO.glob("docs/**/*.md"))
REFERENCE = [page for page in PAGES if page.startswith("docs/reference/")]
DOCUMENTS = ("README.md", *PAGES, "python/README.md", "tests/README.md")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.M | re.S)


class Block(NamedTuple):
    language: str
    text: str
    output: str | None  # of the block of text right below it


def text(document: str) -> str:
    return (REPO / document).read_text()


def sections(document: str) -> dict[str, str]:
    """Map the titles of a document's sections to their texts; before the first it is ''."""
    parts = f"\n{text(document)}".split("\n## ")
    return {
        "": parts[0],
        **{t: s for t, _, s in (p.partition("\n") for p in parts[1:])},
    }


def blocks(text: str, *languages: str) -> list[Block]:
    """List the blocks of these languages, or all but outputs."""
    found: list[Block] = []
    end = 0
    for match in FENCED.finditer(text):
        language, body = match.groups()
        is_output = (
            language == "text" and bool(found) and not text[end : match.start()].strip()
        )
        end = match.end()
        if is_output and found[-1].output is None:
            found[-1] = found[-1]._replace(output=body)
        else:
            found.append(Block(language, body, None))
    return [b for b in found if not languages or b.language in languages]


def run_sql(block: Block, dbname: str) -> None:
    """Run a block in psql, and compare what it says with what the page shows."""
    ran = subprocess.run(
        ["psql", "-Xq", "-P", "pager=off", "-v", "ON_ERROR_STOP=1", "-d", dbname],
        input=block.text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, block.text + ran.stdout
    assert "WARNING" not in ran.stdout
    if block.output is None:
        assert "NOTICE" not in ran.stdout
    else:
        said, shown = (
            [line.rstrip() for line in text.strip("\n").splitlines()]
            for text in (ran.stdout, block.output)
        )
        assert said == shown, block.text + ran.stdout


def table(text: str, *head: str) -> list[list[str]]:
    """Find the first table whose first headings are these, and return its rows."""
    start = text.index("\n| " + " | ".join(head) + " |") + 1
    lines = text[start:].split("\n\n")[0].splitlines()
    assert re.fullmatch(r"[|-]+", lines[1])
    return [
        [cell.strip() for cell in re.split(r"(?<= )\|(?= )", line[1:-1])]
        for line in lines[2:]
    ]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def prose(document: str) -> list[str]:
    """List the sentences, and the cells of tables, without code and headings."""
    text = FENCED.sub("\n", (REPO / document).read_text())
    text = re.sub(r"^(#| {4}).*$", "", text, flags=re.M)
    text = re.sub(r"\n(?![\n|*-]|\d+\. )", " ", text)
    found = re.split(r"\n|(?<=[.:!?])\** |(?<= )\|(?= )", text)
    return [" ".join(sentence.split()) for sentence in found if sentence.strip()]
