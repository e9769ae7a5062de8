"""Programs that examine a machine, and `ask`, which runs them in processes of their own.

A program prints each result as a JSON object or list on a line as soon as it is known, so that results survive a crash.
If a program crashes, hangs or opens a device, this does not affect the calling process. `ask` starts all commands at
once and waits for each. When it returns, all of them and their children have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Start of a program: records the log messages about the choice of a BLAS.
_LISTEN = """
import json, logging, os, tempfile
def report(**facts):
    print(json.dumps(facts), flush=True)
class Listener(logging.Handler):
    said = []
    def emit(self, record):
        self.said.append([record.levelno >= logging.WARNING, record.getMessage()])
logger = logging.getLogger("synkhronos")
logger.addHandler(Listener())
logger.setLevel(logging.INFO)
"""

#: End of a program: links a module to the BLAS and tests it. The caller removes the folder of the module.
_LINK = """
from synkhronos._theano_compat.blas_probe import link
from synkhronos._theano_compat.blas_probe import load_table
from synkhronos._theano_compat.blas_probe import try_routines
report(cxx=cxx, ldflags=flags, said=Listener.said)
if cxx:
    report(arguments=cmodule.GCC_compiler.compile_args())
if cxx and flags:
    os.makedirs(config.base_compiledir, exist_ok=True)  # which PyTensor has not made yet
    folder = tempfile.mkdtemp(prefix="synkhronos_", dir=config.base_compiledir)
    report(folder=folder)
    try:
        module = link(flags, folder)
        report(module=module, **try_routines(lambda: load_table(module))._asdict())
    except OSError as error:
        report(trouble=str(error))
"""

#: Reports the device that the user's flags and configuration files name, Theano's compiler, the flags of its BLAS, and
#: the result of linking to it. Uses the CPU regardless of the device, because GPUs are tested elsewhere.
THEANO = (
    _LISTEN
    + """
cpu = "device=cpu,init_gpu_device=,contexts=,force_device=False"
given = os.environ.get("THEANO_FLAGS", "")
os.environ["THEANO_FLAGS"] = ",".join(filter(None, [given, cpu]))
import synkhronos, theano
from theano.configparser import parse_config_string, theano_cfg
from theano.gof import cmodule
report(device=parse_config_string(given).get("device") or theano_cfg.get("global", "device", fallback=""))
synkhronos.fork  # all of the package is imported by now
config = theano.config
cxx, flags = config.cxx, config.blas.ldflags
"""
    + _LINK
)

#: Reports the same for PyTensor, and whether numba, its default compiler, works.
PYTENSOR = (
    _LISTEN
    + """
import synkhronos, pytensor, numba
from pytensor.link.c import cmodule
synkhronos.fork  # all of the package is imported by now
config = pytensor.config
cxx, flags = config.cxx, config.blas__ldflags
report(linker=config.linker, three=numba.njit(lambda: 3)())
"""
    + _LINK
)

#: Reports the speed of a product of float32 matrices on one core. The argument is the file of a module that is linked
#: to a BLAS; if it is empty, NumPy's BLAS is used.
PRODUCT = """
import ctypes, json, os, sys, time
import numpy, threadpoolctl
n = 1024
a, b = numpy.random.RandomState(0).rand(2, n, n).astype("float32")
c = numpy.empty_like(a)
if sys.argv[1]:
    from synkhronos._theano_compat.blas_probe import file_of, load_table
    address = load_table(sys.argv[1])["sgemm_"]
    file = os.path.realpath(file_of(address))
    sgemm = ctypes.CFUNCTYPE(None)(address)
    size, one, zero = ctypes.c_int(n), ctypes.c_float(1), ctypes.c_float(0)
    sizes, (of_a, of_b, of_c) = [ctypes.byref(size)] * 3, (ctypes.c_void_p(m.ctypes.data) for m in (a, b, c))
    given = [b"N", b"N", *sizes, ctypes.byref(one), of_b, sizes[0], of_a, sizes[0], ctypes.byref(zero), of_c, sizes[0]]
    def multiply():
        sgemm(*given)
else:
    file = ""
    def multiply():
        numpy.dot(a, b, out=c)
def serves(info):
    path = os.path.realpath(info["filepath"])
    return info["user_api"] == "blas" and (path == file if file else "numpy" in path.split(os.sep)[-2])
with threadpoolctl.threadpool_limits(1):
    best, begin = 1e9, time.perf_counter()
    while time.perf_counter() - begin < 0.4:
        start = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - start)
    info = next(filter(serves, threadpoolctl.threadpool_info()), {})
print(json.dumps({
    "gflops": 2e-9 * n**3 / best,
    "right": bool(numpy.allclose(c[:8], a[:8].astype(float) @ b.astype(float), rtol=1e-3)),
    "file": file or os.path.realpath(info.get("filepath") or numpy.__file__),
    "kind": info.get("internal_api"), "version": info.get("version"), "kernels": info.get("architecture"),
}))
"""

#: Reports pygpu's version and folder, and libgpuarray's file and API version.
PYGPU = """
import json, os
import pygpu.gpuarray
maps = [line.split()[-1] for line in open("/proc/self/maps")]
print(json.dumps({
    "version": pygpu.__version__,
    "path": os.path.dirname(os.path.realpath(pygpu.__file__)),
    "library": next((path for path in maps if os.path.basename(path).startswith("libgpuarray.so")), ""),
    "api": list(pygpu.gpuarray.api_version()),
}))
"""

#: Reports the MPI that mpi4py uses, without initializing it.
MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version().strip(chr(0)).splitlines()[0].strip()}))
"""

#: Reports the OpenCL platforms, each with its devices. Device D of platform P is ``openclP:D`` in pygpu.
OPENCL = """
import ctypes, json, sys
cl = ctypes.CDLL("libOpenCL.so")
ALL_DEVICES, NAME, MEMORY = 0xFFFFFFFF, 0x102B, 0x101F
PLATFORM_NAME, PLATFORM_VERSION = 0x0902, 0x0901
def listed(function, *arguments):
    count = ctypes.c_uint()
    if function(*arguments, 0, None, ctypes.byref(count)) or not count.value:
        return []
    found = (ctypes.c_void_p * count.value)()
    if function(*arguments, count, found, None):
        return []
    return [ctypes.c_void_p(one) for one in found]
def text(function, thing, what):
    buffer = ctypes.create_string_buffer(1024)
    function(thing, what, 1024, buffer, None)
    return buffer.value.decode(errors="replace").strip()
for platform in listed(cl.clGetPlatformIDs):
    devices = []
    for device in listed(cl.clGetDeviceIDs, platform, ctypes.c_uint64(ALL_DEVICES)):
        memory = ctypes.c_uint64()
        cl.clGetDeviceInfo(device, MEMORY, 8, ctypes.byref(memory), None)
        devices.append([text(cl.clGetDeviceInfo, device, NAME), memory.value])
    name, version = (text(cl.clGetPlatformInfo, platform, what) for what in (PLATFORM_NAME, PLATFORM_VERSION))
    print(json.dumps([name, version, devices]))
"""

#: Tests a device of pygpu, and reports the error of each step: opening it, a kernel, and on CUDA a matrix product and
#: an NCCL communicator. (With OpenCL, compiling the product may take half a minute.)
TRIAL = """
import json, sys, numpy, pygpu
from pygpu import blas, collectives
device = sys.argv[1]
host = numpy.arange(4, dtype="float32").reshape(2, 2)
def opening():
    global context, array
    context = pygpu.init(device)
    array = pygpu.array(host, context=context, cls=pygpu.ndgpuarray)
def kernel():
    assert numpy.array_equal(numpy.asarray(array + array), host + host), "a wrong sum"
def gemm():
    product = blas.gemm(1.0, array, array, 0.0)
    assert numpy.allclose(numpy.asarray(product), host.dot(host)), "a wrong product"
def nccl():
    collectives.GpuComm(collectives.GpuCommCliqueId(context), 1, 0).all_reduce(array, "sum")
for step in (opening, kernel, gemm, nccl) if device.startswith("cuda") else (opening, kernel):
    try:
        step()
        error = ""
    except Exception as failure:
        text = failure.args[0] if failure.args else type(failure).__name__
        error = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    print(json.dumps({step.__name__: error}), flush=True)
    if error and step in (opening, kernel):
        break
"""


class Answer(NamedTuple):
    """Result of a command.

    Attributes
    ----------
    output : str
        The command's standard output, even if the command failed later.
    error : str
        One line that describes the failure; empty if the command succeeded.
    """

    output: str
    error: str

    @property
    def values(self) -> list[Any]:
        """The decoded values of all output lines that are JSON."""
        found = []
        for line in self.output.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    @property
    def record(self) -> dict[str, Any]:
        """All JSON objects of the output, merged into one dict."""
        return {name: value for part in self.values if isinstance(part, dict) for name, value in part.items()}


def python(program: str, *arguments: str, isolated: bool = False) -> list[str]:
    """Return the command that executes a program with this interpreter.

    Parameters
    ----------
    program : str
        Source code.
    *arguments : str
        The program's ``sys.argv[1:]``.
    isolated : bool
        Ignore site-packages and Python's environment variables, which halves the start-up time.
    """
    options = ["-I", "-S"] if isolated else []
    return [sys.executable, *options, "-c", program, *arguments]


def ask(commands: Mapping[Any, list[str]], environment: Mapping[str, str], timeout: float) -> dict[Any, Answer]:
    """Execute commands at the same time.

    Parameters
    ----------
    commands : mapping
        The commands by key.
    environment : mapping
        The environment variables of each command.
    timeout : float
        Seconds for all commands together. Commands that have not ended by then are killed.

    Returns
    -------
    dict
        An `Answer` for each command, by key.
    """
    started: dict[Any, subprocess.Popen[str]] = {}
    answers = {}
    deadline = time.monotonic() + timeout
    try:
        for name, command in commands.items():
            try:
                started[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                answers[name] = Answer("", f"cannot be started: {error}")
        for name, process in started.items():
            answers[name] = _answer(process, deadline, timeout)
    finally:
        for process in started.values():
            if process.poll() is None:
                _kill(process)
                process.communicate()
    return {name: answers[name] for name in commands}


def _answer(process: subprocess.Popen[str], deadline: float, timeout: float) -> Answer:
    try:
        output, errors = process.communicate(timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return Answer(output, f"no answer within {timeout:g} seconds")
    if process.returncode == 0:
        return Answer(output, "")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    relevant = [line for line in lines if not line.startswith(("compilation terminated", "collect2:"))]
    said = relevant[-1] if relevant else ""
    if process.returncode > 0:
        return Answer(output, said or f"exit code {process.returncode}")
    number = -process.returncode
    return Answer(output, f"ended by signal {number} ({signal.strsignal(number)})" + (f"; {said}" if said else ""))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it has started, because these may keep its standard output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
