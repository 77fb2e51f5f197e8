"""Inside a sandbox: a TCP port for harnesses that cannot talk to a Unix socket.

    python3 -I -S forward.py [--listen HOST:PORT] [--to SOCKET] [--home DIR] -- COMMAND…

Makes the home directory a copy of DIR, listens on 127.0.0.1:8080, passes every connection on to the model's socket, runs the command, ends with its
status. When it ends, the sandbox does, so nothing is left behind. It is shown to the sandbox as a file and imports nothing of gyre; the standard
library of any Python 3.9 will do.
"""

import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading

CHUNK = 1 << 16


def pump(a: socket.socket, b: socket.socket) -> None:
    """Pass bytes both ways until both sides have finished."""
    other = {a: b, b: a}
    with selectors.DefaultSelector() as selector, a, b:
        for side in other:
            selector.register(side, selectors.EVENT_READ)
        try:
            while selector.get_map():
                for key, _ in selector.select():
                    side = a if key.fileobj is a else b
                    data = side.recv(CHUNK)
                    if data:
                        other[side].sendall(data)
                    else:  # for the gateway, a client that stops sending is gone: pass that on at once
                        selector.unregister(side)
                        other[side].shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side is gone: both are closed


def serve(listener: socket.socket, path: str) -> None:
    while True:
        connection, _ = listener.accept()
        upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            upstream.connect(path)
        except OSError:
            connection.close()
            continue
        threading.Thread(target=pump, args=(connection, upstream), daemon=True).start()


def main(argv: list) -> int:  # type: ignore[type-arg]
    options = {"--listen": "127.0.0.1:8080", "--to": os.environ.get("GYRE_MODEL_SOCKET", "/run/gyre/model.sock"), "--home": ""}
    while argv and argv[0] in options:
        options[argv[0]], argv = argv[1], argv[2:]
    if len(argv) < 2 or argv[0] != "--":
        print("usage: forward.py [--listen HOST:PORT] [--to SOCKET] [--home DIR] -- COMMAND…", file=sys.stderr)
        return 2
    if options["--home"]:
        shutil.copytree(options["--home"], os.environ["HOME"])
    host, _, port = options["--listen"].rpartition(":")
    listener = socket.create_server((host, int(port)))
    threading.Thread(target=serve, args=(listener, options["--to"]), daemon=True).start()
    try:
        status = subprocess.run(argv[1:], check=False).returncode
    except OSError as e:
        print(f"{argv[1]}: {e.strerror}", file=sys.stderr)
        return 127
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
