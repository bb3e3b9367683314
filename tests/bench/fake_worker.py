"""Stands for a contender's process in tests of the protocol: starts in no time, does what its name asks of it."""

import faulthandler
import json
import os
import signal
import sys
import time

LOSSES = [2.0, 1.9, 1.8]
journal = os.environ["FAKE_WORKER_JOURNAL"]
faulthandler.register(signal.SIGURG, all_threads=False)


def note(what):
    with open(journal, "a") as file:
        file.write(f"{who} {what}\n")


def journal_so_far():
    with open(journal, "a+") as file:
        file.seek(0)
        return file.read()


def ticks():
    """Works for a while, and says so."""
    for _ in range(60):
        note("tick")
        time.sleep(0.01)


def prepared():
    if os.environ.get("FAKE_WORKER_BUSY") == who:
        ticks()
    elif os.environ.get("FAKE_WORKER_BUSY") and contender == "checkpoint":
        while " tick" not in journal_so_far():
            time.sleep(0.01)
    elif os.environ.get("FAKE_WORKER_BUSY") and contender == "wholestep":
        time.sleep(0.3)
    if contender == "compile-reduce-overhead":
        print("a library says goodbye", flush=True)
        os._exit(3)
    if contender == "compile-max-autotune" or os.environ.get("FAKE_WORKER_SLOW") == who:
        print("\N{RIGHTWARDS ARROW}" * 1000, flush=True)
        time.sleep(60)
    losses = [1.2 * loss for loss in LOSSES] if contender == "compile" else LOSSES
    return {"losses": losses, "compile_seconds": 1.0, "items": "4 rows"}


with os.fdopen(int(sys.argv[2]), "w") as answers:
    for line in sys.stdin:
        order = json.loads(line)
        print("noise on stdout", flush=True)
        found = {}
        if order["do"] == "begin":
            contender = order["contender"]
            who = f"{order['case'][0]} {contender}"
            note("begin")
        elif order["do"] == "prepare":
            full = os.environ.get("FAKE_WORKER_FULL") == who and journal_so_far().count("prepare") < 3
            note("prepare")
            found = {"error": "CUDA out of memory", "out_of_memory": True} if full else prepared()
        elif order["do"] == "rounded":
            note("rounded")
            found = {"rounded": {"nudged": LOSSES}}
        elif order["do"] == "time":
            note("time")
            found = {"seconds": 0.25 if contender == "wholestep" else 0.5, "steps": 4}
        elif order["do"] == "memory":
            found = {"peak_bytes": 1000, "state_bytes": 100}
        elif order["do"] == "profile":
            note("profile")
            found = {"error": "no trace"} if os.environ.get("FAKE_WORKER_BLIND") == who else {"us": 1.0, "calls": 2.0}
        elif order["do"] == "end":
            break
        answers.write(json.dumps(found) + "\n")
        answers.flush()
