"""The blocks of the package's README, by their section.

A module that tests import from: PYTEST_DONT_REWRITE, or pytest warns.
"""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "python" / "README.md"


def blocks(section: str, language: str = "python") -> list[str]:
    """List the blocks of a section; those before the first one are of ''."""
    for part in f"\n{README.read_text()}".split("\n## "):
        title, _, text = part.partition("\n")
        if title == section:
            return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    raise LookupError(section)


def sections() -> list[str]:
    return re.findall(r"^## (.*)$", README.read_text(), re.M)
