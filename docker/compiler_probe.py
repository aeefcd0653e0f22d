"""Compile and load a C extension as Triton does for its launchers: it takes gcc, headers and a folder to load from.

An image whose torch is for a CPU has no Triton, and compiles nothing.
"""

from __future__ import annotations

from importlib.metadata import version

SOURCE = """
#include <Python.h>
static struct PyModuleDef probe = {PyModuleDef_HEAD_INIT, "probe", 0, -1, 0};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&probe); }
"""

if __name__ == "__main__":
    if version("torch").endswith("+cpu"):
        print("nothing to compile: torch is for a CPU")
    else:
        from triton.runtime.build import compile_module_from_src

        print("compiled", compile_module_from_src(SOURCE, "probe").__file__)
