"""Compiled modules that all pytest processes share.

Each pytest process compiles into its own folder, because only one process at a time can compile into a folder. Of three
processes, each would compile two thirds of the modules that another one has compiled already. So a module is kept under
the hash of its source and of the compiler's arguments, and the next process that would compile it gets a copy.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from backend_flags import WORKER


def share_modules(cmodule):
    """Make the backend whose module of compilers is ``cmodule`` look for kept modules before it compiles."""
    folder = Path(cmodule.config.base_compiledir) / "shared_modules"
    folder.mkdir(parents=True, exist_ok=True)
    for kept in () if WORKER else folder.iterdir():  # once, in the process that starts the others
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if kept.stat().st_nlink == 1:  # the backend has removed it from its own folder
                kept.unlink()
    backends_own = cmodule.output_subprocess_Popen

    def output_subprocess_Popen(command, **options):
        """Run a command of the backend; if it compiles a module, use the kept one or keep it."""
        found = _name_and_target(command, str(cmodule.config.compiledir))
        if found is None:
            return backends_own(command, **options)
        kept, target = folder / found[0], found[1]
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(kept, target)
            return b"", b"", 0
        result = backends_own(command, **options)
        if result[2] == 0:
            with contextlib.suppress(OSError):  # another process was faster, or the file system has no hard links
                os.link(target, kept)
        return result

    cmodule.output_subprocess_Popen = output_subprocess_Popen


def _name_and_target(command, compiledir):
    """Return the name of the kept module and the file to compile; `None` if the command compiles no module."""
    if not isinstance(command, list) or "-shared" not in command or "-o" not in command:
        return None
    place = command.index("-o")
    target, rest = command[place + 1], command[:place] + command[place + 2 :]
    sources = [part for part in rest if part.endswith(".cpp")]
    rest = [part for part in rest if part not in sources]
    if len(sources) != 1 or any(compiledir in part for part in rest):
        return None
    described = [Path(sources[0]).read_text(encoding="utf-8"), Path(target).name, *rest]
    return hashlib.sha256("\0".join(described).encode()).hexdigest() + ".so", target
