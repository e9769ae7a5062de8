"""Have ``synkhronos._theano_compat`` patch Theano and Lasagne when they are first imported.

A line in a ``.pth`` file imports this module when Python starts, in every program of the environment. The module is
therefore small, and does not import the package, which would import Theano.
"""

import sys


class Watcher:
    """Finder for ``sys.meta_path`` that ``synkhronos._theano_compat.install`` replaces by a `PatchFinder`."""

    synkhronos_role = "watch"

    def find_spec(self, name, path=None, target=None):
        """Return the `PatchFinder`'s spec of ``theano`` or ``lasagne`` if it is installed; return None for others."""
        if name not in ("theano", "lasagne"):
            return None
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        found = [one.find_spec(name, path, target) for one in others]
        if not any(spec and spec.origin for spec in found):  # a namespace package has no origin
            return None
        import os
        from importlib.util import module_from_spec, spec_from_file_location

        # loaded under another name, because synkhronos._theano_compat would import the package
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "synkhronos", "_theano_compat", "__init__.py")
        spec = spec_from_file_location("_synkhronos_compat", file)
        compat = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(compat)
        return compat.install().find_spec(name, path, target)


sys.meta_path.insert(0, Watcher())
