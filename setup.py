"""What pyproject.toml cannot say: a ``.pth`` file at the top of site-packages.

Python executes it at start-up, so that a program may import Theano before it imports synkhronos
(see ``_synkhronos_start.py``). Everything else is in pyproject.toml.
"""

from setuptools import setup  # isort: skip  (it brings the distutils of the next line)
from distutils.command.install_headers import install_headers


class InstallBesidePackages(install_headers):
    """Install "headers" into site-packages.

    Of all the commands that copy a file as it is, this one runs for wheels and for editable
    installations alike.
    """

    def finalize_options(self):
        """Take the directory of the packages for the target."""
        super().finalize_options()
        self.install_dir = self.get_finalized_command("install").install_lib


setup(headers=["synkhronos-start.pth"], cmdclass={"install_headers": InstallBesidePackages})
