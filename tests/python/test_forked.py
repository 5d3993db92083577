"""What forked.py starts cannot be told from what Python's subprocess starts."""

import os
import subprocess
import sys

import forked
import pytest

PROGRAM = """
import os, signal, sys
print(__name__, sys.argv, sys.orig_argv, sys.path, sys.flags, os.getcwd(), dict(os.environ))
print(os.getppid(), os.getpgid(0), os.getsid(0), sorted(os.listdir("/proc/self/fd")))
print({number: signal.getsignal(number) for number in range(1, 32)})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
for file in sys.stdin, sys.stdout, sys.stderr:
    print(file.encoding, file.errors, file.line_buffering, file.write_through)
print("told", file=sys.stderr)
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("how", ["0", "3", "kill"])
def test_a_fork_is_like_a_new_process(tmp_path, how, unbuffered) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "program", how]
    of = {"PYTHONPATH": forked.PATH, "PYTHONUNBUFFERED": unbuffered, "OF": "test"}
    options = {"cwd": tmp_path, "env": {**os.environ, **of}}
    assert forked.is_usual(command, options["env"]) == (sys.platform == "linux")
    new = subprocess.run(command, capture_output=True, text=True, **options)
    fork = forked.run(command, **options)
    assert (fork.returncode, fork.stderr) == (new.returncode, new.stderr)
    assert fork.stdout.splitlines() == new.stdout.splitlines()
    assert len(new.stdout.splitlines()) == 7
