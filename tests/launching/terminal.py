"""Answer a program's questions at a terminal of its own."""

import contextlib
import os
import pty
import select
import signal
import time

LIMIT_S = 150
QUIET_S = 1.0  # after which a program that has written something waits for an answer


def answer(command, answers, **variables):
    """Run a command at a terminal and press Enter at each question, after what belongs there.

    Args:
        command: program and arguments.
        answers: part of a question -> what is typed before Enter.
        variables: of the environment.

    Returns:
        Exit code, and all that was seen.
    """
    command = [str(word) for word in command]
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(variables)
        os.execvp(command[0], command)
    seen, begun_s, asked = "", time.monotonic(), 0
    try:
        while time.monotonic() - begun_s < LIMIT_S:
            if select.select([terminal], [], [], QUIET_S)[0]:
                try:
                    read = os.read(terminal, 4096)
                except OSError:  # so Linux says that nobody writes any more
                    break
                seen += read.decode(errors="replace")
            elif len(seen) > asked:
                typed = next((text for part, text in answers.items() if part in seen[asked:]), "")
                asked = len(seen)
                os.write(terminal, typed.encode() + b"\r")
        else:
            raise TimeoutError(seen)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL if time.monotonic() - begun_s >= LIMIT_S else 0)
        status = os.waitpid(child, 0)[1]
        os.close(terminal)
    return os.waitstatus_to_exitcode(status), seen
