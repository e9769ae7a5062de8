"""The handwritten digits: MNIST's files from a folder, or downloaded, or scikit-learn's digits.

`load` always gives three sets, for training, validation and test, of float32 images in [0, 1] of
shape ``(n, 1, 28, 28)`` and int32 labels of shape ``(n,)``. Nothing here needs Theano or ranks.
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

tqdm.monitor_interval = 0  # no thread that watches the bars: the ranks are forked from this process

# MNIST's files, and the SHA-256 of each as the mirrors have it.
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
DIGITS = "digits"  # in place of a folder
TIMEOUT = 5.0  # seconds without an answer, or without a byte
MNIST_VALIDATION = 10000  # the last of the 60,000 training images
DIGITS_TEST, DIGITS_VALIDATION = 300, 200  # of 1,797


class DigitSets(NamedTuple):
    """Images ``(n, 1, 28, 28)`` float32 in [0, 1], and labels ``(n,)`` int32, in three sets."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_valid: np.ndarray
    y_valid: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    source: str


def load(where: str | None = None, mirrors: Sequence[str] = MIRRORS) -> DigitSets:
    """Load the digits from where `locate` finds them; its arguments are the same."""
    place = locate(where, mirrors)
    return load_digits() if place == DIGITS else load_mnist(Path(place))


def locate(where: str | None = None, mirrors: Sequence[str] = MIRRORS) -> str:
    """Find the digits, or download them.

    Parameters
    ----------
    where : str, optional
        A folder with MNIST's four IDX files (gzip or not), or to which they are downloaded; a cache
        folder if left out. ``"digits"`` stands for scikit-learn's digits.
    mirrors : sequence of str
        Addresses, ending in a slash, under which the files are looked for, one after the other.

    Returns
    -------
    str
        The folder, or ``"digits"`` where there are no files and no network; it is printed why.
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
    """Give the folder for downloads: ``synkhronos/mnist`` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "synkhronos" / "mnist"


def find_file(folder: Path, name: str) -> Path | None:
    """Find an IDX file, compressed or not; None if there is none."""
    candidates = (folder / name, folder / name[: -len(".gz")])
    return next((path for path in candidates if path.is_file()), None)


def has_files(folder: Path) -> bool:
    """Return whether a folder has all four files."""
    return all(find_file(folder, name) for name in FILES)


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes, with gzip or without.

    Returns
    -------
    numpy.ndarray of uint8
        With as many dimensions as the file's header says.

    Raises
    ------
    ValueError
        If it is not such a file, or its length is not what the header says.
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
    """Download the files that a folder lacks, from the first mirror that has them right.

    A file appears in the folder only when it is whole and its checksum correct.

    Raises
    ------
    OSError
        If no mirror gave a file; the last one's reason.
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
            except OSError as error:  # those of requests are OSErrors
                reason = error
        else:
            raise OSError(f"no mirror gave {name} ({reason})")


def download_file(url: str, path: Path, checksum: str) -> None:
    """Download one file next to its place, check it, and only then give it its name."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    try:
        pooch.retrieve(url, f"sha256:{checksum}", path.name, path.parent, downloader=downloader)
    except ValueError as error:
        raise OSError(f"{url}: a wrong checksum: {error}") from None


def load_mnist(folder: Path) -> DigitSets:
    """Load MNIST from its four files; the end of the training images is kept for validation.

    Raises
    ------
    ValueError
        If a file is broken, or the files do not fit together.
    """
    x, y, x_test, y_test = (read_idx(find_file(folder, name)) for name in FILES)
    if len(x) != len(y) or len(x_test) != len(y_test) or x.shape[1:] != (28, 28):
        raise ValueError(f"the files in {folder} do not fit together: {x.shape} and {y.shape}")
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

    The three sets are the same ones each time.
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
    """Bring images ``(n, 28, 28)`` of values 0 to `top` to ``(n, 1, 28, 28)`` in [0, 1]."""
    return np.divide(images[:, None], top, dtype=np.float32)
