"""Runs that end in the middle of a write."""

from calibrant.data.files import WRITERS


def interrupt_third_write(monkeypatch):
    """Let the third file be half written when the run is interrupted, as by Ctrl-C."""
    write, count = WRITERS[".npz"], 0

    def interrupted(path, arrays):
        nonlocal count
        count += 1
        if count == 3:
            path.write_bytes(b"half of it")
            raise KeyboardInterrupt
        write(path, arrays)

    monkeypatch.setitem(WRITERS, ".npz", interrupted)
