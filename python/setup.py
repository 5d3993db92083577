"""Puts the SQL into the wheel and the source distribution; the rest is in pyproject.toml."""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
CLONE = HERE.parent
SQL = Path("pgqueue", "pgqueue.sql")
UPGRADES = Path("pgqueue", "upgrades")  # by the version that each upgrades
OPS = Path("pgqueue", "ops")


def write_sql(folder: Path) -> None:
    """Build the plain scripts in a clone; a source distribution already has them."""
    (folder / UPGRADES).mkdir(parents=True, exist_ok=True)
    if (CLONE / "Makefile").exists():
        subprocess.run(["make", "-s", "-C", str(CLONE), "plain"], check=True)
        control = (CLONE / "pgqueue.control").read_text()
        (new,) = re.findall(r"^default_version = '(.+)'", control, re.M)
        script = CLONE / "sql" / f"pgqueue--{new}.plain.sql"
        for path in (CLONE / "sql").glob(f"pgqueue--*--{new}.plain.sql"):
            old = path.name.split("--")[1]
            shutil.copy(path, folder / UPGRADES / f"{old}.sql")
        ops = CLONE / "sql" / "ops"
    else:
        script, ops = HERE / SQL, HERE / OPS
        shutil.copytree(HERE / UPGRADES, folder / UPGRADES, dirs_exist_ok=True)
    (folder / SQL).write_bytes(script.read_bytes())
    shutil.copytree(ops, folder / OPS, dirs_exist_ok=True)


class BuildWithSql(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_sql(Path(self.build_lib))


class SdistWithSql(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_sql(Path(base_dir))


setup(cmdclass={"build_py": BuildWithSql, "sdist": SdistWithSql})
