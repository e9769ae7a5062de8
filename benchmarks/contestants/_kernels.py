"""Names of the kernels that multiply matrices in this process: library, version and set of kernels."""

import os
import re


def of_theano():
    """Return the name of the kernels of the BLAS that Theano is linked to."""
    import theano
    import threadpoolctl

    from synkhronos._theano_compat.blas_probe import try_blas

    path = os.path.realpath(try_blas(theano.config.blas.ldflags).file or os.sep)
    for info in threadpoolctl.threadpool_info():
        if info["user_api"] == "blas" and os.path.realpath(info["filepath"]) == path:
            return " ".join(filter(None, (info["internal_api"], info["version"], info.get("architecture"))))
    return os.path.basename(path) or "none"


def of_torch():
    """Return the name of PyTorch's kernels."""
    import torch

    found = re.search(r"(Math Kernel Library|OpenBLAS) Version ([\d.]+)", torch.__config__.show())
    library = " ".join(found.groups()) if found else "a BLAS of its own"
    return f"{library}, {torch.backends.cpu.get_cpu_capability()}"
