"""Fake CUDA libraries, built by the C compiler; they export the functions that return versions and devices.

They are placed where drivers, wheels, toolkits and conda install NVIDIA's. In tests of complete commands they claim to
be CUDA 9, so that no library of a machine with a real GPU fits them.
"""

import os
import shutil
import subprocess

import pytest

CC = shutil.which("gcc") or shutil.which("cc")

needs_compiler = pytest.mark.skipif(CC is None, reason="the libraries are built by a C compiler, and there is none")

SOURCES = {
    "cuda": """
        #include <string.h>
        #include <stdlib.h>
        int cuDriverGetVersion(int *version) { *version = NUMBER; return 0; }
        int cuInit(unsigned flags) { if (CRASH) abort(); return FAILS; }
        int cuDeviceGetCount(int *count) { *count = 2; return 0; }
        int cuDeviceGet(int *device, int index) { *device = index; return 0; }
        int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device ? "Second" : "First"); return 0; }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(16 + device) << 30; return 0; }
        int cuDeviceGetAttribute(int *value, int which, int device)
        { int both = device ? 90 : CAPABILITY; *value = which == 75 ? both / 10 : both % 10; return 0; }
        int cuGetErrorString(int error, const char **text) { *text = "no device is there"; return 0; }
    """,
    "nvrtc": """
        static int architectures[] = {ARCHITECTURES};
        int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = MINOR; return 0; }
        int nvrtcGetNumSupportedArchs(int *count) { *count = sizeof architectures / sizeof(int); return 0; }
        int nvrtcGetSupportedArchs(int *found)
        { for (unsigned i = 0; i < sizeof architectures / sizeof(int); i++) found[i] = architectures[i]; return 0; }
    """,
    "cublas": """
        int cublasLtIsThere(void);
        int cublasGetProperty(int kind, int *value)
        { int version[] = {MAJOR, MINOR, cublasLtIsThere()}; *value = version[kind]; return 0; }
    """,
    "nccl": "int ncclGetVersion(int *version) { *version = NUMBER; return 0; }",
    "cudnn": "#include <stddef.h>\nsize_t cudnnGetVersion(void) { return NUMBER; }",
}


def build(path, source, *options, **macros):
    """Compile a library to a path, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    command = [CC, "-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", *defined, "-x", "c", "-", "-o", str(path)]
    subprocess.run([*command, "-x", "none", *options], input=source, text=True, check=True, timeout=60)
    return path


def build_driver(folder, number=9010, capability=70, fails=0, crash=0):
    """Build a driver's library as NVIDIA installs it, and return its path."""
    macros = {"NUMBER": number, "CAPABILITY": capability, "FAILS": fails, "CRASH": crash}
    file = build(folder / "libcuda.so.390.157", SOURCES["cuda"], **macros)
    (folder / "libcuda.so.1").symlink_to(file.name)
    return file


def build_nvrtc(folder, major, minor, architectures="50, 60, 70, 90"):
    """Build NVRTC next to its builtins, as in NVIDIA's wheels."""
    build(folder / f"libnvrtc-builtins.so.{major}.{minor}", "int builtins;")
    macros = {"MAJOR": major, "MINOR": minor, "ARCHITECTURES": architectures}
    return build(folder / f"libnvrtc.so.{major}", SOURCES["nvrtc"], **macros)


def build_cublas(folder, major, minor):
    """Build cuBLAS, which loads cuBLASLt from its own folder, as in NVIDIA's wheels."""
    lt = build(folder / f"libcublasLt.so.{major}", "int cublasLtIsThere(void) { return 1; }")
    origin = ["-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"]
    return build(folder / f"libcublas.so.{major}", SOURCES["cublas"], str(lt), *origin, MAJOR=major, MINOR=minor)


def build_wheels(site, cuda=(9, 1), nccl=990203, cudnn=None):
    """Build NVIDIA's wheels, installed in the folder ``site``."""
    build_nvrtc(site / "nvidia" / "cuda_nvrtc" / "lib", *cuda)
    build_cublas(site / "nvidia" / "cublas" / "lib", *cuda)
    build(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2", SOURCES["nccl"], NUMBER=nccl)
    if cudnn:
        build(site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.7", SOURCES["cudnn"], NUMBER=cudnn)
    return site


def build_cache(path, *folders):
    """Build a loader cache of some folders by ldconfig, and return its path."""
    if not os.access("/sbin/ldconfig", os.X_OK):
        pytest.skip("there is no ldconfig here")
    configuration = path.with_suffix(".conf")
    configuration.write_bytes(b"\n".join(map(os.fsencode, folders)))
    command = ["/sbin/ldconfig", "-X", "-C", str(path), "-f", str(configuration), "-i"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return str(path)
