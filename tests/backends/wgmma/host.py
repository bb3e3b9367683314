"""What `wholestep/backends/wgmma` generates, run on a CPU: the same functions around sums that torch has computed.

It walks tiles as `product.cu` does, without tensor cores: rows of 128 with one partial sum each, columns in pairs.
Windows are gathered by the kernel's own coordinates, and by copies that do what the manual says of the instruction.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from wholestep.backends.wgmma.products import COLUMNS, ROWS, SUMMED, Matrix, Product, Vector
from wholestep.backends.wgmma.windows import Convolution

TYPES = r"""
#define __device__
#define __forceinline__ inline
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16;
"""

PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
struct Args {
    const void *vec[NVEC + 1], *row[NROW + 1], *table[NTABLE + 1];
    float *part[NSUM + 1], *across[NACROSS + 1];
    void* end[NEND + 1];
    const unsigned char* mask[NMASK + 1];
    unsigned char* packed[NPACKED + 1];
    int m, n, k;
};
static inline float as_float(u32 x) { float f; std::memcpy(&f, &x, 4); return f; }
static inline float bf16_low(u32 p) { return as_float(p << 16); }
static inline float bf16_high(u32 p) { return as_float(p & 0xFFFF0000u); }
static inline u32 bf16_of(float x) {
    u32 b; std::memcpy(&b, &x, 4);
    return x != x ? 0x7FC0 : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
static inline u32 bf16_pair(float a, float b) { return bf16_of(a) | bf16_of(b) << 16; }
static inline float f16_low(u32 p) { _Float16 h; u16 b = (u16)p; std::memcpy(&h, &b, 2); return (float)h; }
static inline float f16_high(u32 p) { return f16_low(p >> 16); }
static inline u32 f16_of(float x) { _Float16 h = (_Float16)x; u16 b; std::memcpy(&b, &h, 2); return b; }
static inline u32 f16_pair(float a, float b) { return f16_of(a) | f16_of(b) << 16; }
static inline float exp2_(float x) { return exp2f(x); }
static inline float reciprocal_(float x) { return 1.0f / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float looked_up_f32(const void* from, u32 at) { return ((const float*)from)[at]; }
static inline u32 looked_up_16(const void* from, u32 at) { return ((const u16*)from)[at]; }
"""

WALK = r"""
extern "C" void run(
    const float* sums, Args* given, u16** in, const long* in_strides, u16** out, const long* out_strides,
    const long* mask_strides, const long* packed_strides, const float* beside, long summed) {
    Args& args = *given;
    const int rows = (args.m + 127) / 128, columns = (args.n + 127) / 128;
    for (int y = 0; y < args.m; ++y) {
        float high[NROW + 1][4];
        heights(args, y, high);
        for (int x = 0; x < args.n; x += 2) {
            float known[NVEC + 1][4], made[2][NOUT + 1], sum[2][NSUM + 1];
            u32 read[NIN + 1][4], written[NOUT + 1][4];
            vectors(args, x, known, 0);
            for (int i = 0; i < NIN; ++i)
                read[i][0] = in[i][y * in_strides[i] + x] | (u32)in[i][y * in_strides[i] + x + 1] << 16;
            for (int e = 0; e < 2; ++e) {
                float v[2], own[NIN + 1], b[NVEC + 1], r[NROW + 1], over[NACROSS + 1];
                for (int p = 0; p < PARTS; ++p) v[p] = sums[((long)p * args.m + y) * args.n + x + e];
                for (int p = 0; TURN && p < 2; ++p) v[p] = sums[(long)y * args.n + (x + e & ~TURN) + p * TURN];
                unpack(read, 0, e, own);
                for (int i = 0; i < NVEC; ++i) b[i] = known[i][e];
                for (int i = 0; i < NROW; ++i) r[i] = high[i][0];
                bool k[NMASK + 1], t[NPACKED + 1];
                const int byte = x / 32 * 4 + x % 8 / 2, bit = x % 32 / 8 * 2 + e;
                for (int i = 0; i < NMASK; ++i) k[i] = args.mask[i][y * mask_strides[i] + byte] >> bit & 1;
                around(args, v, own, b, r, k, y, x + e, x + e & TURN, made[e], sum[e], over, t);
                for (int i = 0; i < NPACKED; ++i) {
                    unsigned char& to = args.packed[i][y * packed_strides[i] + byte];
                    to = (bit ? to : 0) | (unsigned char)(t[i] << bit);
                }
                for (int i = 0; i < NACROSS; ++i) {
                    float& to = args.across[i][(x / 128) * args.m + y];
                    to = (x + e) % 128 ? to + over[i] : over[i];
                }
                for (int i = 0; i < NSUM; ++i) {
                    float& to = args.part[i][(y / 128) * args.n + x + e];
                    to = y % 128 ? to + sum[e][i] : sum[e][i];
                }
            }
            pack(made[0], made[1], written, 0);
            for (int i = 0; i < NOUT; ++i) {
                out[i][y * out_strides[i] + x] = (u16)written[i][0];
                out[i][y * out_strides[i] + x + 1] = (u16)(written[i][0] >> 16);
            }
        }
    }
    for (int y = 0; y < args.m; ++y) {
        float s[NACROSS + 1] = {};
        for (int i = 0; i < NACROSS; ++i)
            for (int c = 0; c < columns; ++c) s[i] += args.across[i][(long)c * args.m + y];
        crossing(args, y, s);
    }
    for (int x = 0; x < args.n; ++x) {
        float s[NSUM + 1] = {};
        for (int i = 0; i < NSUM; ++i)
            for (int r = 0; r < rows; ++r) s[i] += args.part[i][(long)r * args.n + x];
        ending(args, x, s);
    }
    for (int x = 0; x < summed; ++x) aside(args, x, beside + x);
}
"""

GATHER = r"""
struct Image { int sizes[4], lower[2], upper[2], steps[2]; long strides[3]; };
extern "C" void gather(
    const u16* image, const Image* box, const Window* window, int m, int parity, u16* windows, const u16* weights,
    int n, u16* rows, int* numbers) {
    const int steps = steps_of(*window, parity), width = steps * BK, channels = window->channels;
    for (int row = 0; row < m; ++row) numbers[row] = number_of(*window, row, parity);
    for (int row = 0; row < m; row += 128) {
        Walk walk(*window, row, parity);
        for (int step = 0; step < steps; ++step, walk.next(*window)) {
            int x = walk.x, y = walk.y, at = walk.image;
            for (int i = 0; i < 128; ++i) {
                const long over = x + walk.over(*window), down = y + walk.down(*window);
                const bool across = over >= 0 && over < box->sizes[1] && down >= 0 && down < box->sizes[2];
                for (int c = 0; c < BK; ++c) {
                    const int channel = walk.channel + c;
                    const bool inside = across && at < box->sizes[3] && channel < box->sizes[0];
                    const long from = channel + over * box->strides[0] + down * box->strides[1] + at * box->strides[2];
                    windows[(long)(row + i) * width + step * BK + c] = inside ? image[from] : 0;
                }
                if ((x += box->steps[0]) < box->sizes[1] + box->upper[0]) continue;
                x = box->lower[0];
                if ((y += box->steps[1]) < box->sizes[2] + box->upper[1]) continue;
                y = box->lower[1], ++at;
            }
            for (int r = 0; row == 0 && r < n; ++r)
                for (int c = 0; c < BK; ++c) {
                    const int tap = walk.tap(*window), channel = walk.channel + c;
                    const long row = ALONG_B ? channel : r, column = ALONG_B ? r : channel;
                    const long at = (row * TAPS + tap) * (ALONG_B ? n : channels) + column;
                    rows[(long)r * width + step * BK + c] = channel < channels ? weights[at] : 0;
                }
        }
    }
}
"""


def convolved(product: Convolution, tensors: Sequence[torch.Tensor], folder: Path) -> torch.Tensor:
    """Sums of windows and weights as tiles have them, step by step. After the last window there are zeros alone."""
    text = product.source(product.shape())  # type: ignore[arg-type]
    kind = text[text.index("struct Taps") : text.index("struct Args")].replace("#endif", "")
    walk = text.partition("// ---- windows")[2].partition("// ---- numbers")[0].partition("\n")[2]
    source, made = folder / "gather.cpp", folder / "gather.so"
    taps = product.op.w.type.shape[2] * product.op.w.type.shape[3]
    given = {"WINDOW": 1, "BK": SUMMED, "PARITIES": product.parities, "ALONG_B": int(product.along_b), "TAPS": taps}
    defined = "".join(f"#define {name} {value}\n" for name, value in given.items())
    source.write_text(f"{defined}{TYPES}{kind}\n{walk}{GATHER}")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-w", "-o", str(made), str(source)], check=True)
    how, window = product.gathering, (ctypes.c_int * len(product.window()))(*product.window())
    numbers = (ctypes.c_int * 16)(*how.sizes, *how.lower, *how.upper, *how.steps)
    strides = (ctypes.c_long * 3).from_buffer(numbers, 40)
    strides[:] = how.strides
    image, weights = (tensors[product.places[m.argument].argument] for m in (product.a, product.b))
    high = product.m // product.parities
    sums = torch.full((product.m, product.n), float("nan"))
    for parity, own in enumerate(product.how.taps):
        width = -(-image.shape[1] // SUMMED) * SUMMED * own.all
        shapes = ((-(-high // ROWS) * ROWS, width), (product.n, width))
        windows, rows = (torch.full(shape, float("nan"), dtype=image.dtype) for shape in shapes)
        places = torch.full((high,), -1, dtype=torch.int32)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (image, windows, weights, rows, places)]
        library = ctypes.CDLL(str(made))
        library.gather(at[0], numbers, window, high, parity, at[1], at[2], product.n, at[3], at[4])
        assert not windows[high:].any()
        sums[places.long()] = windows[:high].float() @ rows.float().T
    return sums


def run(product: Product, tensors: Sequence[torch.Tensor], folder: Path) -> None:
    """Runs a product on tensors of a CPU: operands and results of its region."""
    text = product.source(product.shape()).partition("// ---- what follows the product")  # type: ignore[arg-type]
    defined = "".join(
        line
        for line in text[0].splitlines(True)
        if line.startswith("#define N") or line.startswith(("#define PARTS ", "#define TURN "))
    )
    functions = text[0][text[0].index("__device__ __forceinline__ float bf16_rounded") :]
    functions = "".join(own for own in split(functions) if "asm" not in own)
    source, made = folder / "host.cpp", folder / "host.so"
    source.write_text(defined + TYPES + PRELUDE + functions + product.generated + WALK)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-w", "-o", str(made), str(source)], check=True)

    def pointer(own: Matrix | Vector) -> int:
        place = product.places[own.argument]
        whole = tensors[place.argument]
        return whole.data_ptr() + (place.begin + own.begin) * whole.element_size()

    def matrix(own: Matrix) -> torch.Tensor:
        whole = tensors[own.argument]
        return whole.as_strided((own.rows, own.columns), (own.stride, 1), whole.storage_offset() + own.begin).float()

    beside = torch.zeros(0)
    if isinstance(product, Convolution):
        sums = convolved(product, tensors, folder)
    else:
        sides = [matrix(side) for side in product.sides]
        left = torch.cat(sides).T if product.along_a else torch.cat(sides, 1)
        right = matrix(product.b) if product.along_b else matrix(product.b).T
        sums = torch.stack([left @ right[:, b : b + product.n] for b in product.begins]).contiguous()
        beside = (beside, left.sum(1), right.sum(0))[product.aside].contiguous()
    partial = [torch.full((-(-product.m // ROWS), product.n), float("nan")) for _ in range(product.sums)]
    crossed = [torch.full((-(-product.n // COLUMNS), product.m), float("nan")) for _ in range(product.crossed)]
    given = [map(pointer, own) for own in (product.vectors, product.heights, product.tables)]
    given += [(t.data_ptr() for t in own) for own in (partial, crossed)]
    given += [map(pointer, own) for own in (product.ends, product.masks, product.packed)]
    pointers = [p for own in given for p in (*own, 0)]
    words = (ctypes.c_uint64 * 64)(*pointers)
    sizes = (ctypes.c_int32 * 2).from_buffer(words, 8 * len(pointers))
    sizes[0], sizes[1] = product.m, product.n
    tables = []
    for own in (product.reads, product.writes):
        tables.append((ctypes.c_uint64 * (len(own) + 1))(*map(pointer, own), 0))
        tables.append((ctypes.c_long * (len(own) + 1))(*(m.stride for m in own), 0))
    for own in (product.masks, product.packed):
        tables.append((ctypes.c_long * (len(own) + 1))(*(m.stride for m in own), 0))
    summed = (ctypes.c_void_p(beside.data_ptr()), ctypes.c_long(beside.numel()))
    ctypes.CDLL(str(made)).run(ctypes.c_void_p(sums.data_ptr()), words, *tables, *summed)


def split(text: str) -> list[str]:
    """The functions of a source, one by one."""
    return ["__device__" + own for own in text.split("__device__")[1:]]
