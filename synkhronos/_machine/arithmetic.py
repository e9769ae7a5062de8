"""What the vector units of the processor can do, and the kernels of BLAS libraries that use them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping

from synkhronos._machine.probing import ask

__all__ = ["peak_of_core", "width_of_kernels", "width_of_processor"]

#: Multiplies and adds in registers alone, by the widest vectors that the compiler knows of this processor.
_PEAK = r"""
#include <chrono>
#include <cstdio>
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
enum { CHAINS = 12, STEPS = 1 << 17 };
int main() {
    Vector sums[CHAINS] = {}, factor = {}, term = {};
    factor += 0.999f;
    term += 1e-3f;
    double best = 0;
    for (int turn = 0; turn < 60; turn++) {
        auto begin = std::chrono::steady_clock::now();
        for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * factor + term;
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        double rate = 2.0 * LANES * CHAINS * STEPS / took.count() / 1e9;
        if (rate > best) best = rate;
    }
    float used = 0;
    for (int i = 0; i < CHAINS; i++) used += sums[i][0];
    std::printf("{\"peak\": %.1f, \"used\": %d}\n", best, used > 0);
}
"""

#: OpenBLAS's sets of kernels, by the width of their vectors in bits; those that are not listed use 128.
_WIDTHS = {
    512: ("SkylakeX", "Cooperlake", "SapphireRapids"),
    256: ("Haswell", "Zen", "Excavator", "Sandybridge", "Bulldozer", "Piledriver", "Steamroller"),
}


def peak_of_core(compiler: str, environment: Mapping[str, str]) -> float:
    """10⁹ floating-point operations a second, of float32, of one core's vector units; 0 where that cannot be tried."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "peak.cpp"), os.path.join(folder, "peak")
        with open(source, "w") as file:
            file.write(_PEAK)
        command = [compiler, "-std=c++11", "-O3", "-march=native", "-ffp-contract=fast", source, "-o", program]
        if ask({"compile": command}, environment, 60.0)["compile"].error:
            return 0.0
        return float(ask({"run": [program]}, environment, 60.0)["run"].record.get("peak", 0.0))


def width_of_kernels(kernels: str) -> int:
    """Bits of the vectors that a set of OpenBLAS's kernels uses, by its name."""
    return next((width for width, names in _WIDTHS.items() if kernels in names), 128)


def width_of_processor(cpuinfo: str = "/proc/cpuinfo") -> int:
    """Bits of the widest vectors of this machine's processor that OpenBLAS has kernels for; 0 if it is no x86."""
    try:
        with open(cpuinfo) as file:
            found = re.search(r"^flags\s*:(.*)$", file.read(), re.MULTILINE)
    except OSError:
        return 0
    flags = found[1].split() if found else []
    needed = {512: {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}, 256: {"avx2", "fma"}, 128: {"sse2"}}
    return next((width for width, names in needed.items() if names <= set(flags)), 0)
