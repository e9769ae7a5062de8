"""Load handwritten digits: MNIST from a folder or by download, or scikit-learn's digits.

`load` returns training, validation and test sets of float32 images in [0, 1], shape ``(n, 1, 28, 28)``, and int32
labels, shape ``(n,)``. This module needs neither Theano nor ranks.
"""

from __future__ import annotations

import gzip
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

tqdm.monitor_interval = 0  # start no monitor thread, because this process forks the ranks

# MNIST's files and their SHA-256 checksums.
FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
DIGITS = "digits"  # value of `where` for scikit-learn's digits
TIMEOUT = 5.0  # seconds without a response, or without further bytes
MNIST_VALIDATION = 10000  # at the end of the 60,000 training images
DIGITS_TEST, DIGITS_VALIDATION = 300, 200  # of 1,797


class DigitSets(NamedTuple):
    """Three sets of float32 images ``(n, 1, 28, 28)`` in [0, 1] and int32 labels ``(n,)``, and their source."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_valid: np.ndarray
    y_valid: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    source: str


def load(where: str | None = None, mirrors: Sequence[str] = MIRRORS) -> DigitSets:
    """Load the digits that `locate` finds; the arguments are the same."""
    place = locate(where, mirrors)
    return load_digits() if place == DIGITS else load_mnist(Path(place))


def locate(where: str | None = None, mirrors: Sequence[str] = MIRRORS) -> str:
    """Find the digits, or download them.

    Parameters
    ----------
    where : str, optional
        Folder of MNIST's four IDX files, compressed by gzip or not. Missing files are downloaded to it. Default:
        `cache_folder`. ``"digits"``: use scikit-learn's digits.
    mirrors : sequence of str
        Base URLs that end in a slash, tried in this order.

    Returns
    -------
    str
        The folder, or ``"digits"`` if files are missing and the download fails. The reason is then printed.
    """
    folder = Path(where) if where else cache_folder()
    if where == DIGITS or has_files(folder):
        return where or str(folder)
    try:
        download(folder, mirrors)
    except OSError as error:
        print(f"MNIST is not in {folder} and was not downloaded: {error}")
        print("Using scikit-learn's 1,797 handwritten digits, enlarged to 28x28, in its place.")
        return DIGITS
    return str(folder)


def cache_folder() -> Path:
    """Return the folder for downloads, ``synkhronos/mnist`` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "synkhronos" / "mnist"


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of an IDX file, compressed or not, or None if it does not exist."""
    candidates = (folder / name, folder / name[: -len(".gz")])
    return next((path for path in candidates if path.is_file()), None)


def has_files(folder: Path) -> bool:
    """Return whether a folder has all four files."""
    return all(find_file(folder, name) for name in FILES)


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes, compressed by gzip or not.

    Returns
    -------
    numpy.ndarray of uint8
        An array with the shape in the file's header.

    Raises
    ------
    ValueError
        If the file is not an IDX file of unsigned bytes, or its length differs from that in its header.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    start = 4 + 4 * data[3]
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != np.prod(shape, dtype=int):
        raise ValueError(f"{path} has {len(data) - start} bytes of data, its header says {shape}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def download(folder: Path, mirrors: Sequence[str] = MIRRORS) -> None:
    """Download each missing file from the first mirror that provides it with the correct checksum.

    A file appears in the folder only after its checksum is verified.

    Raises
    ------
    OSError
        If no mirror provides a file. The message contains the last mirror's error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in FILES.items():
        if find_file(folder, name):
            continue
        reason: Exception | None = None
        for mirror in mirrors:
            try:
                download_file(mirror + name, folder / name, checksum)
                break
            except OSError as error:  # exceptions of requests are OSErrors
                reason = error
        else:
            raise OSError(f"no mirror gave {name} ({reason})")


def download_file(url: str, path: Path, checksum: str) -> None:
    """Download a file under a temporary name, verify its checksum, and rename it."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    try:
        pooch.retrieve(url, f"sha256:{checksum}", path.name, path.parent, downloader=downloader)
    except ValueError as error:
        raise OSError(f"{url} has a wrong checksum: {error}") from None


def load_mnist(folder: Path) -> DigitSets:
    """Load MNIST from its four files; the last training images become the validation set.

    Raises
    ------
    ValueError
        If a file is damaged, images and labels differ in number, or images are not 28x28.
    """
    x, y, x_test, y_test = (read_idx(find_file(folder, name)) for name in FILES)
    if len(x) != len(y) or len(x_test) != len(y_test) or x.shape[1:] != (28, 28):
        raise ValueError(f"images and labels in {folder} do not match: {[a.shape for a in (x, y, x_test, y_test)]}")
    stop = len(x) - min(MNIST_VALIDATION, len(x) // 6)
    images, labels = scale(x, 255), y.astype(np.int32)
    return DigitSets(
        images[:stop],
        labels[:stop],
        images[stop:],
        labels[stop:],
        scale(x_test, 255),
        y_test.astype(np.int32),
        f"MNIST from {folder}",
    )


def load_digits() -> DigitSets:
    """Load scikit-learn's digits: 8x8 pixels of 0 to 16, interpolated linearly to 28x28.

    The division into three sets is always the same.
    """
    from scipy.ndimage import zoom
    from sklearn import datasets

    digits = datasets.load_digits()
    order = np.random.RandomState(0).permutation(len(digits.images))
    images = scale(zoom(digits.images, (1, 3.5, 3.5), order=1), 16)
    stop = len(order) - DIGITS_TEST
    parts = np.split(order, [stop - DIGITS_VALIDATION, stop])
    labels = digits.target.astype(np.int32)
    sets = [array[part] for part in parts for array in (images, labels)]
    return DigitSets(*sets, "scikit-learn's digits, enlarged from 8x8 to 28x28")


def scale(images: np.ndarray, top: int) -> np.ndarray:
    """Convert images ``(n, 28, 28)`` with values from 0 to `top` to float32 ``(n, 1, 28, 28)`` in [0, 1]."""
    return np.divide(images[:, None], top, dtype=np.float32)
