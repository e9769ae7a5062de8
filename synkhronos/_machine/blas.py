"""The BLAS that the engine is linked to, and NumPy's: whether they work, and how fast they multiply on one core."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from synkhronos._machine import arithmetic, remedies
from synkhronos._machine.choices import chosen_in
from synkhronos._machine.engines import Engine
from synkhronos._machine.inquiries import PRODUCT
from synkhronos._machine.probing import Answer, ask, python
from synkhronos._machine.report import OK, OPTIONAL, UNUSABLE, Part

__all__ = ["blas_parts"]

_SLOWER = "NumPy's is called, which is slower"


def blas_parts(
    answer: Answer, compiler: str, environment: Mapping[str, str], installed: bool, engine: Engine
) -> list[Part]:
    """Describe the BLAS that the engine is linked to, and NumPy's; nothing if the engine cannot be imported.

    Parameters
    ----------
    answer : Answer
        Of the engine's inquiry, whose folder is removed here.
    compiler : str
        The C++ compiler; empty if there is none that works.
    environment : mapping
    installed : bool
        Whether scipy-openblas32 is.
    engine : Engine
    """
    record = answer.record
    try:
        if answer.error:
            return []
        peak = arithmetic.peak_of_core(compiler, environment) if compiler else 0.0
        return [_engines(record, bool(compiler), environment, installed, peak, engine), _numpys(environment, peak)]
    finally:
        if record.get("folder"):
            shutil.rmtree(record["folder"], ignore_errors=True)


def _engines(
    told: Mapping[str, Any],
    compiles: bool,
    environment: Mapping[str, str],
    installed: bool,
    peak: float,
    engine: Engine,
) -> Part:
    """Say to what the engine's modules are linked and what comes of that, as was found when one was.

    What decided on it decides on the remedy, too.
    """
    name = engine.flag("blas.ldflags")
    flags, place = told.get("ldflags", ""), chosen_in(name, environment, engine.module)
    said = [text for _, text in told.get("said", [])]
    warned = [text for warning, text in told.get("said", []) if warning]
    trouble, file = told.get("trouble") or told.get("objection", ""), told.get("file", "")
    remedy = remedies.blas(name, place, environment.get("SYNKHRONOS_BLAS", ""), installed)
    if "ILP64" in environment.get("MKL_INTERFACE_LAYER", "").upper() and "mkl" in "".join([*warned, trouble]).lower():
        remedy = "unset MKL_INTERFACE_LAYER"
    if not compiles:
        return Part("cpu", "BLAS", OPTIONAL, note=f"nothing is linked without a compiler that works: {_SLOWER}")
    if not flags:
        reason = f"{name} is empty in {place}" if place and not warned else "none is linked"
        return Part("cpu", "BLAS", OPTIONAL, note="\n".join([f"{reason}: {_SLOWER}", *said]), remedy=remedy)
    source = f", as {place} says" if place and (trouble or not warned) else ""  # what is refused is warned of
    if not trouble:
        answer = ask({"product": python(PRODUCT, told["module"])}, environment, 60.0)["product"]
        if not answer.error:
            part = _part("BLAS", answer.record, peak, [f"linked by {flags}{source}", *said], environment, remedy)
            if warned and part.state == OK:
                part.state, part.remedy = OPTIONAL, remedy
            return part
        trouble = answer.error
    note = f"{trouble}\n{name} is {flags}{source}"
    return Part("cpu", "BLAS", UNUSABLE, "", os.path.realpath(file) if file else "", note, remedy)


def _numpys(environment: Mapping[str, str], peak: float) -> Part:
    answer = ask({"product": python(PRODUCT, "")}, environment, 60.0)["product"]
    if answer.error:
        return Part("cpu", "NumPy's BLAS", UNUSABLE, note=answer.error)
    return _part("NumPy's BLAS", answer.record, peak, [], environment, "")


def _part(
    name: str, product: Mapping[str, Any], peak: float, notes: list[str], environment: Mapping[str, str], remedy: str
) -> Part:
    """Judge a product that was measured; the remedy is for a library that another one can take the place of."""
    kernels = product.get("kernels") or ""
    version = " ".join(filter(None, (product.get("kind"), product.get("version"))))
    speed = f"{product['gflops']:.0f} GFLOP/s on one core"
    if peak:
        speed += f", {product['gflops'] / peak:.0%} of what its vector units can do ({peak:.0f})"
    notes = [f"{kernels} kernels: {speed}" if kernels else speed, *notes]
    width, widest = arithmetic.width_of_kernels(kernels), arithmetic.width_of_processor()
    state = OK
    if kernels and width < widest:
        notes.insert(0, f"its kernels are of {width} bits, the processor's vectors of {widest}")
        state = OPTIONAL
        if environment.get("OPENBLAS_CORETYPE"):
            remedy = "unset OPENBLAS_CORETYPE"
        elif not remedy or product["file"].endswith("libscipy_openblas.so"):
            remedy = f"export OPENBLAS_CORETYPE={'SKYLAKEX' if widest == 512 else 'HASWELL'}"
    if not product["right"]:
        notes.insert(0, "its product is wrong")
        state = UNUSABLE
    return Part("cpu", name, state, version, product["file"], "\n".join(notes), remedy)
