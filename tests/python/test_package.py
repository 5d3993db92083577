import json
import re
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_every_file_that_must_name_the_version_names_the_same() -> None:
    control = (REPO / "pgqueue.control").read_text()
    versions = re.findall(r"^default_version *= *'(.*)'", control, re.M)
    meta = json.loads((REPO / "META.json").read_text())
    project = tomllib.loads((REPO / "python/pyproject.toml").read_text())["project"]
    versions += [meta["version"], meta["provides"]["pgqueue"]["version"]]
    versions += [project["version"]]
    assert len(versions) == 4
    assert len(set(versions)) == 1
