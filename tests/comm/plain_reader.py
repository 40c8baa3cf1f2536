"""A process that reads as DeepSpeed's does, without DeepSpeed: past the page cache, and it ends where a file is too
short. The first word says what is wrong with it."""

import errno
import mmap
import os
import sys
import time

from afserve.comm.disk.reader_child import serve


class PlainFiles:
    def __init__(self, setup):
        if FAULT == "refused":
            raise OSError("16 MiB of memory cannot be locked")
        self._memory = memoryview(mmap.mmap(setup.memory, setup.windows * setup.window_bytes))
        self._probes = 1  # the first read is what is asked before it may be used

    def read(self, channel, ask):
        path, probes = f"/proc/self/fd/{ask.descriptor}", self._probes
        self._probes = 0
        if FAULT == "silent" or (FAULT == "stale" and not probes):
            return
        if FAULT == "hangs" and not probes:
            time.sleep(3600)
        if FAULT == "fails" and not probes:
            raise OSError(errno.EIO, "broken")
        if FAULT == "raises" and not probes:
            raise KeyError(ask.number)
        if ask.offset + ask.size > os.stat(path).st_size:
            os.abort()
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(file, [self._memory[ask.place : ask.place + ask.size]], ask.offset)
        finally:
            os.close(file)


if __name__ == "__main__":
    FAULT = sys.argv[1]
    serve(PlainFiles, sys.argv[2:])
