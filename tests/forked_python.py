"""Python processes that start at once: forks of a process that has imported and not computed.

A new interpreter imports PyTorch and this package for seconds. On Linux `preparing` forks a process
after the tests are collected and before one runs; `start` lets that process fork another one for
each command. Elsewhere `start` starts a new interpreter.

What is imported already cannot be subject of a command: for that use `subprocess`.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

_requests: socket.socket | None = None


class Started:
    """A command's process, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        return self._end(0)

    def wait(self, timeout: float) -> int:
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return code

    def _end(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(os.read(self._status, 100))
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    arguments: list[str],
    *,
    stdout: IO,
    stderr: IO,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    start_new_session: bool = False,
) -> Started | subprocess.Popen:
    """Start Python with arguments as on its command line: a script, -m MODULE or -c CODE first."""
    if _requests is None:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            start_new_session=start_new_session,
        )
    environment = dict(os.environ if env is None else env)
    request = [arguments, str(cwd or os.getcwd()), environment, start_new_session]
    read, write = os.pipe()
    fds = [stdout.fileno(), stderr.fileno(), write]
    socket.send_fds(_requests, [json.dumps(request).encode()], fds)
    os.close(write)
    return Started(int(os.read(read, 100)), read)


def run(
    arguments: list[str], *, timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Run Python with such arguments to its end, as `subprocess.run` does; its output is kept."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(arguments, stdout=stdout, stderr=stderr, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Fork the process from which `start` forks; it ends with the block, or with this process."""
    global _requests
    if sys.platform != "linux":
        yield
        return
    _requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        _requests.close()
        _serve(theirs)
    theirs.close()
    try:
        yield
    finally:
        # Not closed alone: processes that tests left, such as a loader's workers, hold a copy.
        _requests.shutdown(socket.SHUT_RDWR)
        _requests.close()
        _requests = None
        os.waitpid(child, 0)


def _serve(requests: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children's ends are not waited for
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 2**17, 3)
        if not message:
            os._exit(0)
        if not os.fork():
            _supervise(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def _supervise(request: list, stdout: int, stderr: int, status: int) -> NoReturn:
    """Write the command's process id to `status`, and its exit code when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = multiprocessing.get_context("fork").Process(
        target=_become, args=(*request, stdout, stderr, status)
    )
    process.start()
    os.write(status, str(process.pid).encode())
    process.join()
    with contextlib.suppress(BrokenPipeError):  # who started it may not wait for it
        os.write(status, str(process.exitcode).encode())
    os._exit(0)


def _become(
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    new_session: bool,
    stdout: int,
    stderr: int,
    status: int,
) -> None:
    os.close(status)
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    first, *rest = arguments
    sys.argv = [first, *rest]
    if first in ("-m", "-c"):
        sys.path.insert(0, cwd)
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = [first, *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
