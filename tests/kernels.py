"""What the tests of `%%distributed` share: a notebook kernel that runs cells, and a look at what a test leaves behind."""
import json
import os
import re
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager

LOAD = "%load_ext libai_wb"
IMPORTS = "import os, time, torch, torch.distributed as dist"


def plain(text): return re.sub(r"\x1b\[[0-9;]*m", "", text)


def sessions():
    "Session folders of processes that this one has started, or that are gone: others may be at work on this machine."
    family = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    def ours(folder):
        try: owner = json.loads((folder/"state.json").read_text())["owner"]
        except (OSError, ValueError): return False
        return owner in family or not psutil.pid_exists(owner)
    return {folder for folder in Path(tempfile.gettempdir()).glob("libai-wb-ranks-*") if ours(folder)}


def words_of(process):
    "Its command line; nothing if it has ended, also when nobody has asked how."
    with suppress(psutil.NoSuchProcess): return " ".join(process.cmdline()) # a zombie is an error of this class
    return ""


def ranks_of(pid):
    "The rank processes that process `pid` has started."
    return [p for p in psutil.Process(pid).children() if "serve_rank" in words_of(p)]


def until(there, seconds=40):
    "Wait until `there()` is true."
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(.05)


def wait_gone(processes, seconds=5):
    "Seconds until all processes have ended; fails if one has not."
    began = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive
    return time.monotonic() - began


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    "After the tests there is no rank and no session folder that was not there before."
    folders, children = sessions(), {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert sessions() <= folders
    assert {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE} <= children


class Answer:
    "What a cell has shown: `text` of the streams, `error` (name, value, traceback), `rich` display data, `seconds`, `asked`."
    def __init__(self):
        self.text, self.times, self.error, self.rich, self.seconds, self.asked = "", [], None, [], 0., []
        self.updates, self.value, self.messages = [], None, 0

    def take(self, message):
        kind, content = message["msg_type"], message["content"]
        self.messages += 1
        if kind == "update_display_data": self.updates.append(content)
        if kind == "execute_result": self.value = content["data"]["text/plain"]
        if kind == "stream":
            self.text += content["text"]
            self.times.append(time.monotonic())
        if kind == "display_data": self.rich.append(content)
        if kind == "error": self.error = content["ename"], content["evalue"], plain("\n".join(content["traceback"]))


class Kernel:
    "A notebook kernel that runs cells."
    def __init__(self, folder):
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder), env=os.environ | dict(OMP_NUM_THREADS="1"))
        self.pid = self.manager.provisioner.pid
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)

    def run(self, code, interrupt_after=None, timeout=40, typed=None):
        "Run a cell; `typed` are the lines that somebody in front of the notebook types, `None`: nobody is there."
        answer, began = Answer(), time.monotonic()
        timer = threading.Timer(interrupt_after or 0, os.kill, (self.pid, signal.SIGINT))
        if interrupt_after: timer.start()
        lines = iter(typed or [])
        def stdin(message):
            answer.asked.append(message["content"]["prompt"])
            self.client.input(next(lines))
        reply = self.client.execute_interactive(code, output_hook=answer.take, timeout=timeout,
                                                allow_stdin=typed is not None, stdin_hook=stdin)
        answer.seconds = time.monotonic() - began
        assert (reply["content"]["status"] == "error") == (answer.error is not None)
        return answer

    def ok(self, code):
        "Run a cell that must pass."
        answer = self.run(code)
        assert not answer.error, answer.error
        return answer

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@contextmanager
def new_kernel(folder):
    kernel = Kernel(folder)
    try:
        kernel.ok(LOAD)
        yield kernel
    finally: kernel.close()
