"""Parts of the build that pyproject.toml cannot express: the compiled core, and a ``.pth`` file in site-packages.

Python executes the ``.pth`` file when it starts, so that a program may import Theano before it imports synkhronos (see
``_synkhronos_start.py``). Everything else is in pyproject.toml.
"""

import glob
import os
import sys
import sysconfig

from setuptools import Extension, setup

from setuptools.command.build_ext import build_ext  # isort: skip
from setuptools.errors import CCompilerError, ExecError, PlatformError  # isort: skip
from distutils.command.install_headers import install_headers  # isort: skip  (setuptools provides distutils)

if sys.platform != "linux":
    raise SystemExit(
        f"synkhronos is for Linux, and this is {sys.platform}: install it in a Linux container or, on Windows, in WSL 2"
    )

FLAGS = ["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
FLAGS += ["-ffp-contract=off"]  # fused multiply-adds would change the results on processors that have them


class BuildCore(build_ext):
    """Compile the parts in C, or exit with one line that names the missing packages."""

    def build_extensions(self):
        """Compile with NumPy's headers; NumPy is imported here because only the build needs it."""
        import numpy

        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.exists(header):
            version = "{}.{}".format(*sys.version_info)
            raise SystemExit(
                f"synkhronos has a part in C, and Python's headers are not here ({header}): install them "
                f"(on Debian and Ubuntu: apt-get install python{version}-dev)"
            )
        for extension in self.extensions:
            extension.include_dirs.append(numpy.get_include())
        try:
            super().build_extensions()
        except (CCompilerError, ExecError, PlatformError) as error:
            raise SystemExit(
                f"synkhronos has a part in C, and it could not be compiled ({error}): install a C compiler "
                "(on Debian and Ubuntu: apt-get install gcc libc6-dev), or name yours in CC"
            ) from error


class InstallIntoSitePackages(install_headers):
    """Install the ``.pth`` file, which is declared as a header, into site-packages.

    This is the only command that copies a file unchanged both for wheels and for editable installations.
    """

    def finalize_options(self):
        """Set the target to site-packages."""
        super().finalize_options()
        self.install_dir = self.get_finalized_command("install").install_lib


core = Extension(
    "synkhronos._native.native",
    sorted(glob.glob("synkhronos/_native/*.c")),
    depends=sorted(glob.glob("synkhronos/_native/*.h")),
    extra_compile_args=FLAGS,
)
combiner = Extension(
    "synkhronos.extensions.pymc._combiner",
    ["synkhronos/extensions/pymc/combiner.c"],
    extra_compile_args=FLAGS,
)
setup(
    headers=["synkhronos-start.pth"],
    ext_modules=[core, combiner],
    cmdclass={"build_ext": BuildCore, "install_headers": InstallIntoSitePackages},
)
