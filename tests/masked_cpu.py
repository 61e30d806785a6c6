"""A processor without AVX-512, made of one that has it, so that onnxruntime takes the kernels it has for such.

Programs learn what a processor can do by its instruction ``cpuid``, which nothing may intercept. So a copy of the
library is made in which an instruction of the same size stands in its place that no processor knows; a handler of the
signal that follows asks the processor, hides what is to be hidden, and goes on behind it. Nothing else is changed: what
runs then runs natively.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
from pathlib import Path

_CPUID, _UNKNOWN = b"\x0f\xa2", b"\x0f\x0b"
_HANDLER = r"""
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

static void on_unknown(int number, siginfo_t *info, void *context) {
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned a, b, c, d, leaf = at[REG_RAX], part = at[REG_RCX];
    if (memcmp((void *)at[REG_RIP], "\x0f\x0b", 2)) { signal(SIGILL, SIG_DFL); return; }
    __cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) { /* AVX-512 in all its parts, AMX */
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
    }
    if (leaf == 7 && part == 1) { /* AVX-VNNI, AVX512-BF16 */
        a &= ~(1u << 4 | 1u << 5);
        d &= ~(1u << 4 | 1u << 5);
    }
    at[REG_RAX] = a; at[REG_RBX] = b; at[REG_RCX] = c; at[REG_RDX] = d;
    at[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_unknown;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, 0);
}
"""


def missing() -> str:
    """What is not there to do so; empty if nothing is."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the kernels are those of x86-64 under Linux"
    return "" if shutil.which("gcc") and shutil.which("objdump") else "gcc and objdump are not installed"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that runs on such a processor; files are made in a folder."""
    import onnxruntime

    (folder / "handler.c").write_text(_HANDLER, encoding="ascii")
    handler = folder / "handler.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", handler, folder / "handler.c"], check=True)
    copy = shutil.copytree(Path(onnxruntime.__file__).parent, folder / "onnxruntime")
    for library in (copy / "capi").glob("*.so*"):
        _replace(library)
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "LD_PRELOAD": str(handler), "PYTHONPATH": os.pathsep.join(paths)}


def _replace(library: Path) -> None:
    """Exchanges the instruction wherever the disassembler finds it: its bytes alone may be part of another."""
    listed = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], check=True, capture_output=True, text=True
    ).stdout
    addresses = [int(line.partition(":")[0], 16) for line in listed.splitlines() if line.split()[-1:] == ["cpuid"]]
    code = bytearray(library.read_bytes())
    (table,), (count,) = struct.unpack_from("<Q", code, 32), struct.unpack_from("<H", code, 56)
    segments = [struct.unpack_from("<IIQQQQ", code, table + 56 * at) for at in range(count)]
    for address in addresses:
        offset = next(o + address - a for kind, _, o, a, _, size in segments if kind == 1 and a <= address < a + size)
        assert code[offset : offset + 2] == _CPUID
        code[offset : offset + 2] = _UNKNOWN
    library.write_bytes(code)
