"""Starts another program that ends when its parent dies. Run by path, before anything of the project is imported.

    python -I -S parent_death.py PARENT_PID SIGNAL COMMAND...

On Linux the kernel sends SIGNAL when the parent dies, however it dies; elsewhere this only becomes COMMAND.
"""

import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the signal, then replaces this process by COMMAND."""
    parent, signal_number, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
        if os.getppid() != int(parent):  # The parent died before the line above.
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
