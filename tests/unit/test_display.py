"""`dir`, `help` and notebook tables of the library and its objects."""

import inspect
import pydoc
import re

import numpy as np
from backend import T, theano
from scripts import run_script

import synkhronos as synk

EVIL = "<b>&'\""


def test_the_package_lists_public_names_alone_and_shows_them_in_groups():
    assert set(dir(synk)) == {*synk.__all__, "__version__"}
    text = pydoc.plain(pydoc.render_doc(synk))
    groups = text[: text.index("The public names are imported")]
    assert [name for name in synk.__all__ if not re.search(rf"\b{name}\b", groups)] == []
    for name in synk.__all__:
        if inspect.isfunction(getattr(synk, name)):
            assert "<" not in str(inspect.signature(getattr(synk, name))), name  # no address and no class


def test_objects_list_and_show_what_is_for_users(synchronize):
    synchronize(2)
    x = T.matrix(EVIL)
    f = synk.function([x], [(x.sum(), "sum")], name=EVIL)
    rows = synk.data(np.zeros((4, 3), theano.config.floatX), var=x)
    with synk.profile() as profile:
        pass
    expected = {"counts", "get_shared", "as_theano", "build_inputs", "output_modes", "update_modes", "name", "fn"}
    assert expected <= set(dir(f)) and not {"join"} & set(dir(f))
    assert {"set_value", "shape", "free_memory", "alloc_size"} <= set(dir(rows))
    assert not {"ref", "memory"} & set(dir(rows))
    assert set(dir(profile)) == {"elapsed", "exposed", "hidden", "seconds", "sent", "serial", "total"}
    for one in (f, rows, profile, synk):
        assert not [name for name in dir(one) if name.startswith("_") and name != "__version__"]
    block = synk.session(2)
    tables = [(f, "inputs"), (rows, "(4, 3)"), (profile, "rank 1"), (synk.memory(), "rank 1"), (block, "worker")]
    for one, shown in tables:
        html = one._repr_html_()
        assert shown in html and "<b>" not in html and html.startswith("<table>"), html
    assert "2 ranks" in repr(block)


DEFINITION = """
class Twice(theano.Op):
    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = FACTOR * inputs[0]

FACTOR = 2
x = T.dvector("x")
"""
CALL = """
f = synk.function([x], (Twice()(x).sum(), "sum"), name="again", mode="FAST_COMPILE")
print(float(f(np.arange(6.0))))
"""
BLOCK = """
with synk.session(2, use_gpu=False):
    f = synk.function([x], (Twice()(x).sum(), "sum"), mode="FAST_COMPILE")
    print(float(f(np.arange(6.0))))
"""
FORK, CLOSE = "synk.fork(2, use_gpu=False)", "synk.close()"


def test_cells_can_be_executed_again():
    """Ranks forked after a class is defined again use the new class."""
    cells = [DEFINITION, FORK, CALL, CALL, CLOSE, DEFINITION, FORK, CALL, CLOSE]
    cells += [BLOCK, DEFINITION, BLOCK, "assert 'not entered' in synk.session(2)._repr_html_()"]
    script = f"""
        import __main__
        for number, cell in enumerate({cells!r}):
            exec(compile(cell, f"<ipython-input-{{number}}>", "exec"), __main__.__dict__)
        """
    out, _ = run_script(script)
    assert out.split() == ["30.0"] * 5
