"""Releasing: the version, the packages, and what is published by a tag."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import psycopg
import pytest
import yaml
from cluster import Cluster
from conftest import column, one
from test_package import RELEASED, REPO, client, make, script, version

TAG = {"GIT_AUTHOR_NAME": "a", "GIT_COMMITTER_NAME": "a"} | {
    "GIT_AUTHOR_EMAIL": "a@localhost",
    "GIT_COMMITTER_EMAIL": "a@localhost",
}


def git(*command: str, **options) -> str:
    done = client("git", *command, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path) -> Path:
    if not (REPO / ".git").exists():
        pytest.skip("no clone: a release is made of what git has")
    git("clone", "-q", "--shared", str(REPO), str(tmp_path / "clone"))
    return tmp_path / "clone"


def release(clone: Path, number: str) -> subprocess.CompletedProcess[str]:
    command = ("sh", "packaging/release.sh", number)
    return client(*command, cwd=clone, env={"PATH": "/usr/bin:/bin"} | TAG)


# The version


def test_a_release_writes_the_version_wherever_it_stands_commits_and_tags(clone):
    old = re.escape(version())
    wherever = (
        "grep",
        "-lwE",
        f"(pgqueue[ -]+|This is |\"|')v?{old}",
        "--",
        ".",
        ":!tests",
    )
    stands = set(git(*wherever, cwd=clone).split())
    assert {"pgqueue.control", "META.json", "python/pyproject.toml"} <= stands
    done = release(clone, "98.7.6")
    assert done.returncode == 0, done.stderr
    assert client("git", *wherever, cwd=clone).stdout == ""
    # It is frozen, and what leads to it has its number.
    frozen = "sql/upgrade/pgqueue--98.7.6.sql"
    delta = f"sql/upgrade/{RELEASED[-1]}--98.7.6.sql"
    assert set(git("show", "--format=", "--name-only", cwd=clone).split()) == (
        stands | {"CHANGELOG.md", "docs/upgrading.md", frozen, delta}
    )
    assert "select '98.7.6'" in (clone / frozen).read_text()
    assert not list((clone / "sql/upgrade").glob(f"*--{version()}.sql"))
    assert git("describe", cwd=clone) == "v98.7.6"
    assert git("status", "--porcelain", cwd=clone) == ""
    meta = json.loads((clone / "META.json").read_text())
    assert meta["version"] == meta["provides"]["pgqueue"]["version"] == "98.7.6"
    assert meta["meta-spec"]["version"] == "1.0.0"
    assert re.search(
        r"^## 98\.7\.6, \d{4}-\d\d-\d\d$", (clone / "CHANGELOG.md").read_text(), re.M
    )
    assert "as unreleased" in release(clone, "98.7.7").stderr
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text() + "\n## Unreleased\n")
    git("commit", "-qam", "More", cwd=clone, env=os.environ | TAG)
    refused = (
        "there is no sql/upgrade/98.7.6--98.7.7.sql: what has changed in the tables?"
    )
    assert refused in release(clone, "98.7.7").stderr


def test_a_release_is_refused_without_a_number_or_with_uncommitted_work(clone):
    assert "three numbers" in release(clone, "1.2").stderr
    (clone / "new").touch()
    assert "not committed" in release(clone, "98.7.6").stderr
    assert git("tag", "--list", "v98*", cwd=clone) == ""


def test_every_version_that_was_released_is_in_the_list_of_changes():
    heads = re.findall(r"^## (.+)$", (REPO / "CHANGELOG.md").read_text(), re.M)
    assert heads and all(
        re.fullmatch(r"Unreleased|\d+\.\d+\.\d+, .+", h) for h in heads
    )
    assert heads[0] == "Unreleased" or heads[0].startswith(f"{version()}, ")


@pytest.mark.parametrize("delta", sorted((REPO / "sql/upgrade").glob("[0-9]*--*.sql")))
def test_what_an_upgrade_says_first_is_in_the_list_of_changes(delta):
    said = re.match(r"(?:-- .*\n)+", delta.read_text())
    assert said
    told = " ".join(re.sub("^-- ", "", line) for line in said[0].splitlines())
    changes = " ".join((REPO / "CHANGELOG.md").read_text().split())
    assert f"- {told}" in changes


# PGXN

REQUIRED = {"abstract", "license", "maintainer", "meta-spec", "name", "provides"}
OPTIONAL = {"description", "prereqs", "release_status", "tags", "resources"}
PHASES = {"configure", "build", "test", "runtime", "develop"}
RELATIONS = {"requires", "recommends", "suggests", "conflicts"}


def test_the_zip_for_pgxn_holds_what_its_metadata_name_as_the_specification_says(clone):
    make("-C", str(clone), "dist")
    top = f"pgqueue-{version()}/"
    with zipfile.ZipFile(clone / "dist" / f"{top[:-1]}.zip") as archive:
        names = set(archive.namelist())
        meta = json.loads(archive.read(f"{top}META.json"))
    assert all(name.startswith(top) for name in names)
    assert not [name for name in names if "/.github/" in name or "/dist/" in name]
    assert REQUIRED | {"version"} <= set(meta) <= REQUIRED | OPTIONAL | {"version"}
    assert meta["release_status"] in ("stable", "testing", "unstable")
    assert meta["meta-spec"]["version"] == "1.0.0" and meta["license"] == "postgresql"
    for provided in meta["provides"].values():
        assert set(provided) <= {"abstract", "file", "docfile", "version"}
        assert {top + provided["file"], top + provided["docfile"]} <= names
    for phase, relations in meta["prereqs"].items():
        assert phase in PHASES and set(relations) <= RELATIONS
    for tag in meta["tags"]:
        assert len(tag) < 256 and not re.search(r"[/\\\x00-\x1f]", tag)
    for name in ("Makefile", "pgqueue.control", "LICENSE", "CHANGELOG.md"):
        assert top + name in names
    upgrades = {path.name for path in (REPO / "sql/upgrade").iterdir()}
    assert {f"{top}sql/upgrade/{name}" for name in upgrades} <= names


# Debian


def test_the_package_for_debian_can_be_built_installed_and_used(clone):
    """Installed into the files of a server of its own, by dpkg, because those of the system are not ours."""
    tools = ("pg_buildext", "dpkg-buildpackage", "dh")
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        pytest.skip(
            f"THE DEBIAN PACKAGE IS NOT TESTED: no {', '.join(missing)} here "
            "(apt-get install build-essential debhelper postgresql-server-dev-all)"
        )
    make("-C", str(clone), "deb")
    with FromDeb(clone / "dist") as server:
        assert len(list(server.home.glob("server/usr/share/doc/*pgqueue/*"))) >= 3
        with psycopg.connect(
            host=str(server.home), port=server.port, user="postgres", dbname="postgres"
        ) as db:
            db.execute("create extension pgqueue")
            assert one(db, "select pgqueue.version()") == version()
            assert one(db, "select pgqueue.enqueue('q')") == 1
            paths = "select source from pg_extension_update_paths('pgqueue') where path is not null"
            assert sorted(column(db, paths)) == RELEASED


class FromDeb(Cluster):
    """A server with no file of pgqueue but those of its package."""

    def __init__(self, packages: Path) -> None:
        super().__init__(fast=True)
        self.packages = packages

    def _add_extensions(self, folder: Path) -> None:
        for file in folder.glob("pgqueue*"):
            file.unlink()
        number = folder.parent.name
        (package,) = self.packages.glob(f"postgresql-{number}-pgqueue_*_all.deb")
        root = self.home / "server"
        for name in ("info", "updates", "triggers"):
            (root / "var/lib/dpkg" / name).mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
        options = (f"--root={root}", "--force-depends", "--force-not-root")
        done = client("dpkg", *options, "--install", str(package))
        assert done.returncode == 0, done.stderr


# pg_tle and dbdev


def test_pg_tle_is_told_the_script_and_dbdev_finds_the_same_in_its_folder(db):
    make("tle")
    folder = REPO / "dist/tle/pgqueue"
    body = script().read_text().partition("\n")[2]
    assert body.count("$_pgqueue_$") == body.count("$_pgtle_") == 0
    # Nothing that only psql understands.
    assert not re.search(r"^\\", body, re.M)
    assert (folder / f"pgqueue--{version()}.sql").read_text() == body
    upgrades = {f"pgqueue--{old}--{version()}.sql" for old in RELEASED}
    assert {path.name for path in folder.iterdir()} == {
        "pgqueue.control",
        f"pgqueue--{version()}.sql",
        "README.md",
        *upgrades,
    }
    # As pg_tle declares it, from its first version on.
    db.execute("create schema pgtle")
    db.execute(
        "create function pgtle.install_extension("
        " name text, version text, description text, ext text, requires text[] default null)"
        " returns text[] language sql as 'select array[name, version, description, ext]'"
    )
    told = one(db, folder.with_suffix(".sql").read_text().encode())
    control = (REPO / "pgqueue.control").read_text()
    assert told[:2] == ["pgqueue", version()] and f"comment = '{told[2]}'" in control
    assert told[3].strip() == body.strip()
    db.execute(
        "create function pgtle.install_update_path(name text, fromvers text, tovers text, ext text)"
        " returns text[] language sql as 'select array[name, fromvers, tovers, ext]'"
    )
    db.execute(
        "create function pgtle.set_default_version(name text, version text)"
        " returns text[] language sql as 'select array[name, version]'"
    )
    for old in RELEASED:
        name = f"pgqueue--{old}--{version()}.sql"
        cursor = db.execute((folder.parent / name).read_text().encode())
        (path,) = cursor.fetchone()
        assert path[:3] == ["pgqueue", old, version()]
        body = (REPO / "sql" / name).read_text().partition("\n")[2]
        assert body.count("$_pgqueue_$") == 0 and not re.search(r"^\\", body, re.M)
        assert path[3].strip() == body.strip() == (folder / name).read_text().strip()
        assert cursor.nextset() and cursor.fetchone() == (["pgqueue", version()],)


# Images


@pytest.mark.parametrize("file", ["Dockerfile", "extension.Dockerfile"])
def test_an_image_copies_the_control_file_and_the_script_and_nothing_is_missing(file):
    script(".plain")
    copied = set()
    for line in (REPO / "packaging" / file).read_text().splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            assert target.endswith("/")
            for source in sources:
                found = {path.name for path in REPO.glob(source.rstrip("/"))}
                assert found, source
                copied |= found if "extension" in target else set()
    upgrades = {f"pgqueue--{old}--{version()}.sql" for old in RELEASED}
    assert copied == {"pgqueue.control", f"pgqueue--{version()}.sql"} | upgrades


# Workflows


@pytest.mark.parametrize("path", sorted((REPO / ".github").rglob("*.yml")), ids=str)
def test_a_workflow_calls_targets_and_files_that_exist(path):
    text = path.read_text()
    assert yaml.safe_load(text)
    targets = set(
        re.findall(r"^([a-z-]+):.*## ", (REPO / "Makefile").read_text(), re.M)
    )
    for called in re.findall(r"run: make (.+)", text):
        assert set(called.split()) <= targets
    for name in re.findall(r"file: (\w*\.?Dockerfile)", text):
        assert (REPO / "packaging" / name).exists()


def test_the_tests_run_on_all_versions_that_the_metadata_promise():
    jobs = yaml.safe_load((REPO / ".github/workflows/test.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    promised = re.search(r"^MATRIX = (.+)$", (REPO / "Makefile").read_text(), re.M)
    assert promised
    majors = [each.partition(".")[0] for each in promised[1].split()]
    assert matrix["postgres"] == majors
    project = (REPO / "python/pyproject.toml").read_text()
    pythons = set(matrix["python"]) | {row["python"] for row in matrix["include"]}
    assert pythons == set(re.findall(r"Python :: (3(?:\.\d+)?)\"", project))
    meta = json.loads((REPO / "META.json").read_text())
    least = meta["prereqs"]["runtime"]["requires"]["PostgreSQL"]
    assert least.startswith(f"{majors[0]}.")
    assert f"{majors[0]}+" == (REPO / "debian/pgversions").read_text().strip()
