"""On PYTHONPATH, this takes from a process and its children what Windows lacks, before anything else is imported.

SIGKILL, `os.uname`, `os.statvfs` and the flags of `os.open` stay: Python and numpy themselves need them on Linux.
"""

import os
import signal
import sys

MODULES = ("fcntl", "resource", "termios", "pwd", "grp")
FUNCTIONS = {
    os: (
        *("killpg", "getpgid", "setsid", "sysconf", "fork", "nice", "posix_fallocate", "mkfifo"),
        *("geteuid", "getuid", "getgid", "chown", "getloadavg", "sched_getaffinity"),
    ),
    signal: ("pthread_sigmask", "SIGHUP", "SIGUSR1", "SIGALRM", "setitimer", "alarm"),
}

sys.modules.update(dict.fromkeys(MODULES))  # None: importing it is a ModuleNotFoundError
for module, names in FUNCTIONS.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.supports_dir_fd = set()  # directories cannot be held open there
