"""Instructions that ptxas got wrong, found in a kernel's machine code for Hopper.

ptxas 12.8, which Triton 3.6 and 3.7 bring, was seen to take one register for another where it builds descriptors of the
shared memory that a product reads: R1, the stack pointer, in kernels without a stack; and for the upper word of a
descriptor, a constant, the register of the memory's base where zero belongs. Products then read what nobody wrote.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

# of descriptors, by their swizzles
UPPER_WORDS = {"0x40000040", "0x40000020", "-0x7fffffe0", "-0x3ffffff0"}
ON_STACK = (
    r"LDC R1, |VIADD R1, R1, |IADD3? R1, (PT, PT, )?R1, |IMAD\.MOV\.U32 R1, RZ, RZ, c\[|MOV R1, c\["
)
ZERO = {"RZ", "URZ", "SRZ", "0x0"}
MOVES = re.compile(r"U?MOV|IMAD\.MOV|R2UR|CS2U?R|STL|LDL")


def wrong_instructions(cubins: list[bytes], target: int = 90) -> list[list[str]]:
    """Of each kernel. All are disassembled at once, since a call takes half a second whatever there is."""
    codes = [instructions_of(cubin) for cubin in cubins]
    starts = [0, *accumulate(map(len, codes))]
    lines: list[list[str]] = [[] for _ in codes]
    for address, line in disassembled(b"".join(codes), target):
        lines[bisect_right(starts, address) - 1].append(line)
    return [[*stack_pointer_as_number(of_kernel), *upper_words(of_kernel)] for of_kernel in lines]


def instructions_of(cubin: bytes) -> bytes:
    """What an ELF's section .text.<kernel> holds."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    texts = [s for s in sections if cubin[sections[names][4] + s[0] :].startswith(b".text.")]
    ((_, _, _, _, begin, length),) = texts
    return cubin[begin : begin + length]


def disassembled(code: bytes, target: int) -> Iterator[tuple[int, str]]:
    """Addresses and instructions; the text is kept where Triton keeps its kernels."""
    from triton import __version__
    from triton.runtime.cache import get_cache_manager

    architecture = f"SM{target}{'a' if target >= 90 else ''}"
    kept = get_cache_manager(
        hashlib.sha256(f"{__version__} {architecture}".encode() + code).hexdigest()
    )
    if (path := kept.get_file("instructions.txt")) is None:
        text = run_on(code, "nvdisasm", "--binary", architecture)
        path = kept.put(text, "instructions.txt", binary=False)
    for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", Path(path).read_text()):
        yield int(at, 16), line.strip()


def run_on(content: bytes, tool: str, *options: str) -> str:
    """The output of a tool that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_pointer_as_number(lines: list[str]) -> list[str]:
    """Those that compute with R1 other than addresses on the stack."""
    on_r1 = [line for line in lines if re.search(r"\bR1\b", line)]
    return [line for line in on_r1 if "[R1" not in line and not re.match(ON_STACK, line)]


def upper_words(lines: list[str]) -> list[str]:
    """Those that add the upper word of a descriptor to a register which was last given something else than zero."""
    zeros, wrong = set(ZERO), []
    for line in lines:
        name, _, rest = re.sub(r"^@!?U?P\w+ ", "", line).partition(" ")
        operands = [x.strip().replace(".reuse", "") for x in rest.split(",")]
        if name in ("UIADD3.X", "IADD3.X") and UPPER_WORDS.intersection(operands):
            added = [x for x in operands[1:] if re.fullmatch(r"U?R\d+", x)]
            wrong += [line] if not zeros.issuperset(added) else []
        _follow(zeros, name, operands)
    return wrong


def _follow(zeros: set[str], name: str, operands: list[str]) -> None:
    """Which registers, and places on the stack, are zero after an instruction."""
    written = _written(name, operands[0])
    if MOVES.match(name) and operands[-1] in zeros:
        zeros.update(written)
    else:
        zeros.difference_update(written)


def _written(name: str, to: str) -> list[str]:
    """Registers, or the place on the stack, that an instruction writes: 32 bits each."""
    match = re.fullmatch(r"(U?R)(\d+)", to)
    if match is None:
        return [to] if name.startswith("STL") else []
    wide = 4 if ".128" in name else 2 if ".64" in name or name == "CS2R" else 1
    return [f"{match[1]}{int(match[2]) + i}" for i in range(wide)]
