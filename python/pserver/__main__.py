"""The program `pserver`, as `python -m pserver` and as the command that the package installs."""

import os
import signal
import sys
import sysconfig

from pserver import _pserver


def main() -> None:
    """Runs the program with the arguments of the command line, and ends the process."""
    # The program has handlers of its own. Python's would note a signal, and no Python code runs that looks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    script = os.path.join(sysconfig.get_path("scripts"), "pserver")
    path = script if os.access(script, os.X_OK) else None
    status = _pserver.program(["pserver", *sys.argv[1:]], path)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
