"""Commands whose output nobody reads to its end, or has room for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

PROGRAM = """
import os, sys
from unifmoe_dist.train.cli import run_main

def at_once(arguments):
    print("words", flush=True)

def at_the_end(arguments):
    print("words")

def with_a_status(arguments):
    print("words")
    sys.exit(1)

def for_another_reason(arguments):
    raise BrokenPipeError("of another pipe")

def on_a_full_disk(arguments):
    open("/dev/full", "w").write("words" * 10_000)

for main in (at_once, at_the_end, with_a_status, on_a_full_disk, for_another_reason):
    if (child := os.fork()) == 0:
        reader, writer = os.pipe()
        os.dup2(writer if main is not for_another_reason else 2, 1)
        os.close(reader)
        sys.stdout = open(1, "w", closefd=False)
        run_main(main)
        os._exit(0)
    print(main.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_closed_pipe_ends_a_command_without_a_word_and_a_full_disk_with_a_sentence():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    ends = ["at_once 141", "at_the_end 141", "with_a_status 141", "on_a_full_disk 2", "for_another_reason 1", ""]
    assert done.stdout.split("\n") == ends
    assert done.stderr.count("error: the disk is full ([Errno 28] No space left on device); free space") == 1
    assert done.stderr.count("Traceback") == 1 and "BrokenPipeError: of another pipe" in done.stderr


def test_why_a_rank_stops_is_one_write():
    """Ranks share a log; without a buffer, as launchers have it, a line in two writes may take another's in."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    program = "from unifmoe_dist.runtime.failure import leave_for; leave_for(ValueError('no sum'))"
    with ours:
        with theirs:
            subprocess.run([sys.executable, "-u", "-c", program], stderr=theirs, env={**os.environ, "RANK": "3"})
        said = ours.recv(1 << 16).decode()  # at once, as nobody can write any more
    assert said.startswith("rank 3 failed: ") and said.endswith("ValueError: no sum\n")
