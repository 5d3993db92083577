"""The pages about Python, by their sections; what is before the first has the title of the page.

A module that tests import from: PYTEST_DONT_REWRITE, or pytest warns.
"""

import documents

PAGES = (
    "docs/reference/python.md",
    "docs/fastapi.md",
    "docs/celery.md",
    "docs/dependencies.md",
    "docs/tracing.md",
    "docs/operating.md",
    "docs/dashboard.md",
    "docs/schedules.md",
    "docs/testing.md",
)


def sections() -> dict[str, str]:
    found: dict[str, str] = {}
    for page in PAGES:
        for title, text in documents.sections(page).items():
            title = title or text.strip().partition("\n")[0].removeprefix("# ")
            assert title not in found, title
            found[title] = text
    return found


def blocks(section: str, language: str = "python") -> list[str]:
    """List the blocks of a section."""
    text = sections()[section]
    return [block.text for block in documents.blocks(text, language)]
