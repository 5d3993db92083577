"""The blocks of the package's README, by their section.

A module that tests import from: PYTEST_DONT_REWRITE, or pytest warns.
"""

import documents


def blocks(section: str, language: str = "python") -> list[str]:
    """List the blocks of a section; those before the first one are of ''."""
    text = documents.sections("python/README.md")[section]
    return [block.text for block in documents.blocks(text, language)]


def sections() -> list[str]:
    return list(documents.sections("python/README.md"))[1:]
