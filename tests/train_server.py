"""`python train.py` many times in seconds: torch and Hydra are imported once, every command is a fork of this process.

Listens at the Unix socket that it is given. A connection brings one command, JSON {"argv", "cwd"} with the file
descriptors of its stdout and stderr, and hears a line with its process id, then one with its exit code. Closing
standard input ends the server. A command ends as an interpreter does that ran the script; the jobs of a sweep, which
starts interpreters, are forks of this process, too.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import antlr4  # noqa: F401
import hydra._internal.hydra
import hydra.core.override_parser.overrides_parser
import hydra.core.plugins
import torch._dynamo  # noqa: F401
from command import WarmProcess

import memtrain.cli
import memtrain.tasks.registry  # noqa: F401
from memtrain import sweep

hydra.core.plugins.Plugins.instance()  # looks for all there are


class Forks:
    """In the place of the module `subprocess`: what a sweep starts is started here."""

    PIPE = -1

    def __init__(self, address: str) -> None:
        self._address = address

    def Popen(self, command: list[str], *, cwd: str, **wanted: object) -> WarmProcess:
        return WarmProcess(self._address, command[1:], cwd, stdout=1)


def run_here(argv: list[str], cwd: str, output: int, errors: int) -> None:
    """In a session of its own, as a terminal's process is."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, 64)
    for word in argv:  # shown by /proc/<pid>/fd: the command line there is this process's
        if "/" in word:
            with suppress(OSError, ValueError):
                os.memfd_create(word[:240])
    os.chdir(cwd)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


def attend(connection: socket.socket) -> bool:
    """Fork the command, and tell how it ends. True in the command itself."""
    text, (output, errors), *_ = socket.recv_fds(connection, 2**20, 2)
    command = json.loads(text)
    child = os.fork()
    if child == 0:
        run_here(command["argv"], command["cwd"], output, errors)
        return True
    os.close(output)
    os.close(errors)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return False


def main(address: str) -> None:
    sweep.processes.subprocess = Forks(address)  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who attend
    gc.freeze()  # what is imported is not to be looked through in every child
    print(flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            if attend(connection):
                return  # as the end of its script
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
