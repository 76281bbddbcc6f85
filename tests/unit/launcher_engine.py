"""An engine for the launcher's tests: its arguments are vLLM's, and what becomes of it stands in `$FAKE_ENGINE`.

That is a JSON list with an object for each life, the last one for all that follow: `say` (lines to print), `exit` or
`signal` (how it ends), `after` (seconds since it was seen ready; without, it never is), `hang` (neither gets ready nor
ends), `deaf` (ignores SIGTERM), `moan` (prints that when it gets one), `child` (has a child that ignores SIGTERM). At
each start it notes in `$FAKE_NOTES` what it was given, whom it has started, and who of earlier lives is still there.
"""

import contextlib
import http.server
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

DEAF_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
SEEN = threading.Event()


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "fake-model", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/v1/models":
            SEEN.set()

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return "unix"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def main() -> None:
    notes = Path(os.environ["FAKE_NOTES"])
    seen = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    lives = json.loads(os.environ["FAKE_ENGINE"])
    life = lives[min(len(seen), len(lives) - 1)]
    pids = [os.getpid()]
    if life.get("child"):
        pids.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", DEAF_CHILD]).pid)
    leftovers = [pid for note in seen for pid in note["pids"] if is_alive(pid)]
    note = {"pids": pids, "leftovers": leftovers, "environment": dict(os.environ), "argv": sys.argv}
    with notes.open("a") as stream:
        stream.write(json.dumps(note) + "\n")
    if life.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "moan" in life:
        signal.signal(signal.SIGTERM, lambda *_: (print(life["moan"], flush=True), os._exit(0)))
    for line in life.get("say", []):
        print(line, flush=True)
    if life.get("hang"):
        time.sleep(600)
    if "after" in life or not {"exit", "signal"} & life.keys():
        server = Server(sys.argv[sys.argv.index("--uds") + 1], Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        SEEN.wait(600)
        time.sleep(life.get("after", 600))
    if "signal" in life:
        os.kill(os.getpid(), life["signal"])
    os._exit(life.get("exit", 0))


if __name__ == "__main__":
    main()
