"""Programs in Markdown pages: ``python`` blocks.

A comment in the line before a block can change this: ``continues`` appends the block to the previous program;
``not run: REASON`` and ``run by test_….py`` leave it out. Programs are for Theano, except those marked ``on PyTensor``,
and ``on both``, which have a serial form that prints the same, and a comment with the import for PyTensor. After
``<!-- output -->``, a ``text`` block is the program's output up to the next such block.
"""

import re

ON_BOTH = "on both"
_IMPORT = re.compile(r"^import theano, .*  # on PyTensor: (import .*)$", re.M)
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n+)?^```(?P<kind>python|text)\n(?P<code>.*?)^```$", re.M | re.S)


def programs(path, name, on_theano):
    """Collect the programs of a page for a backend.

    Parameters
    ----------
    path : Path
    name : str
        Name of the page.
    on_theano : bool
        Whether the backend is Theano.

    Returns
    -------
    dict of str to list
        Code, output and mark of each program by page and line, such as ``README.md:12``.
    """
    text = path.read_text(encoding="utf-8")
    found = {}
    program = None
    for block in _BLOCK.finditer(text):
        mark, code = block["mark"] or "", block["code"]
        line = text.count("\n", 0, block.start("code"))
        if mark == ON_BOTH and not on_theano:
            code, n_imports = _IMPORT.subn(r"\1", code)
            assert n_imports == 1
        is_new = block["kind"] != "text" and mark not in ("continues", ON_BOTH)
        if is_new and (mark == "on PyTensor") == on_theano:
            program = None  # for the other backend
        elif block["kind"] == "text":
            if mark == "output" and program:
                program[1] += code
        elif mark == "continues":
            if program:
                program[0] += "\n" * (line - program[0].count("\n")) + code
        elif mark not in ("", "on PyTensor", ON_BOTH):
            assert mark.startswith(("not run: ", "run by ")), f"{path}: {mark}"
            program = None
        else:
            # tracebacks show the document's line numbers
            program = found[f"{name}:{line}"] = ["\n" * line + code, "", mark]
    return found


def serial_form(code):
    """Return the program without Synkhronos, of a program with a line ``synk.fork()`` and exact functions."""
    serial, n_forks = re.subn(r"^synk\.fork\(\).*\n", "\n", code, flags=re.M)
    serial, n_functions = re.subn(r"synk\.function\((.*), exact=True\)", r"theano.function(\1)", serial)
    assert n_forks and n_functions
    return serial
