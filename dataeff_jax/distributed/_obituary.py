"""Last words for a process that cannot speak any more: killed, or aborted in C++."""

import contextlib
import subprocess

# Keeps the last line and says it when the pipe closes without a proper farewell.
_SCRIPT = """
while IFS= read -r line; do last=$line; done
[ -z "$last" ] || echo "$last" >&2
"""


class Obituary:
    """A small shell at the other end of a pipe, which outlives this process.

    It holds the sentence to print if the process ends without `close`. Nothing inside
    the process could do it: SIGKILL cannot be caught, and when the coordinator dies jax
    aborts from a C++ thread, without a name.
    """

    def __init__(self):
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def write(self, sentence: str) -> None:
        """Replace the sentence; an empty one means that nothing needs to be said."""
        pipe = self._shell.stdin
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.write(sentence.replace("\n", " ").encode() + b"\n")
                pipe.flush()

    def close(self) -> None:
        """The process has said itself what there was to say."""
        self.write("")
        with contextlib.suppress(OSError, ValueError):
            self._shell.communicate()
