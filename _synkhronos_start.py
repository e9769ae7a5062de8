"""Waits for the first import of Theano or Lasagne, then has ``synkhronos._theano_compat`` mend them.

A ``.pth`` line imports this module when Python starts, in every program of the environment: it must stay tiny, and must
not import the package, which would import Theano.
"""

import sys


class Watcher:
    """A ``sys.meta_path`` finder that ``synkhronos._theano_compat.install`` replaces by a `Mender`."""

    synkhronos_role = "watch"

    def find_spec(self, name, path=None, target=None):
        """Return None but for ``theano`` and ``lasagne`` where they are, whose specs the `Mender` makes."""
        if name not in ("theano", "lasagne"):
            return None
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        found = [one.find_spec(name, path, target) for one in others]
        if not any(spec and spec.origin for spec in found):  # a folder of that name has none
            return None
        import os
        from importlib.util import module_from_spec, spec_from_file_location

        # Under a name of its own: as synkhronos._theano_compat it would bring the package along.
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "synkhronos", "_theano_compat", "__init__.py")
        spec = spec_from_file_location("_synkhronos_compat", file)
        compat = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(compat)
        return compat.install().find_spec(name, path, target)


sys.meta_path.insert(0, Watcher())
