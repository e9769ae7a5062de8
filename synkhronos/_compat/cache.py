"""Keys under which Theano 1.0.5 stores compiled C code, such that other processes find it again.

Theano compiles some ops anew in every process, workers included:

* An op class with ``__props__ = ()`` (Dot22, the softmax and cross entropy ops, …) counts as one without a version,
  because the empty tuple is appended to the versions, of which none may be empty.
* The version of a `COp` (DimShuffle, ScalarFromTensor, the random generator's DotModulo, …) is Python's hash of its
  source code, and the hash of a string is another one in each process.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .marks import is_mend, mend


def mend_cache_keys() -> None:
    """Make both kinds of op cacheable. Theano must have been imported; calling it again does nothing."""
    from theano.gof.cc import CLinker
    from theano.gof.op import COp

    theanos_own = CLinker.cmodule_key_
    if is_mend(theanos_own):
        return

    @mend
    def cmodule_key_(self: Any, fgraph: Any, *args: Any, **kwargs: Any) -> Any:
        """Give Theano's key, with a version if none but the empty ``__props__`` are in the way."""
        key = theanos_own(self, fgraph, *args, **kwargs)
        if not key or key[0]:
            return key
        versions: list[Any] = []
        for node in self.schedule(fgraph):
            if hasattr(node.op, "c_code_cache_version_apply"):  # not a Scan, whose code is that of its inner function
                versions.append(node.op.c_code_cache_version_apply(node))
            versions.extend(variable.type.c_code_cache_version() for variable in (*node.inputs, *node.outputs))
        return (tuple(versions), *key[1:]) if versions and all(versions) else key

    def c_code_cache_version(self: Any) -> tuple[Any, ...]:
        """Give a version made from the source code that is the same in all processes."""
        digest = hashlib.sha256("\0".join(map(str, self.func_codes)).encode()).digest()
        version: tuple[Any, ...] = (int.from_bytes(digest[:7], "big"),)
        if hasattr(self, "params_type"):
            version += (self.params_type.c_code_cache_version(),)
        return version

    CLinker.cmodule_key_ = cmodule_key_
    COp.c_code_cache_version = c_code_cache_version
