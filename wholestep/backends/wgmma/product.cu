// A matrix product of 16-bit numbers on a Hopper GPU, with what is done to its tiles of sums inside.
//
// A block of three warpgroups stays for many tiles. One thread of the third fetches factors ahead into a ring of stages;
// the other two take turns: while one multiplies, the other computes what follows from its tile of sums, stores it and
// adds up its columns. A tile is 128 rows by 128 columns, or 64 where windows (below) have no more; where the result is
// read at two places at once (PARTS == 2) it is 64 columns of each, unless these are neighbouring stretches of TURN
// columns, as where halves of a head are turned by rotary positions. Results pass through shared memory, 64 columns at a
// time, in the places of what was read
// beside the product or in places of their own.
//
// The first factor may be the windows of an image (WINDOW): row by row of the result, tap by tap, 64 channels at a time.
// They are gathered by the copies themselves, which know how an image is walked; the tiles are then those of a product.
// Where there is one column of tiles and all its weights fit, a block fetches them once (STAYS).
//
// The first factor may be SIDES tensors side by side along what is summed: every step is read from one of them.
//
// The input gradient of a convolution of stride 2 is four such products, by the parity of a pixel (PARITIES): each has
// taps of its own and a quarter of the pixels, every second one of every second row. A tile is of one parity; what lies
// along its rows is then copied as pixels, by a map for each parity.
//
// Where a factor is summed up as well, such as a gradient for that of a bias, two more warps of the third do that.
//
// What follows is generated: `around` for an element, `vectors` for what lies along columns, `heights` for what lies along
// rows, `ending` for finished sums over rows, `crossing` for those over columns, `aside` for those of a factor.
// Given by the generator: NIN, NOUT tensors read and written beside the product, NVEC vectors along columns, NROW along
// rows, NTABLE tensors that are looked up by row and column, NMASK and NPACKED tensors of bits that are read and written
// (32 bits for the columns of a tile that a thread has in a row, two of every eight; a byte for 32 columns), NSUM sums over rows, NACROSS sums over columns, ALONG_A,
// ALONG_B (whether a factor lies along rows or columns instead of along what is summed), PARTS, TURN, RAGGED (whether
// tiles reach over the edge), WINDOW, PARITIES (1 where all pixels have the same taps), STAYS, BN (columns of a tile), NARROW (whether there is one column of tiles), ASIDE
// (0, or which factor is summed up: 1, 2), STAGES, AHEAD (pieces of 64 columns that are read ahead), DEPTH (places per result without something to read), FACTOR
// (the type of factors).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define BM 128
#define BK 64
#define WIDTH (BN / PARTS)
#define PIECES (WIDTH / 64)
#define STAGE (BM * BK * 2)
#define STAGE_B (BN * BK * 2)
#define SLOT (BM * 64 * 2)
#define OWN (NOUT > NIN ? NOUT - NIN : 0)

struct __align__(64) Map { u64 words[16]; };

#if WINDOW
// of the pixels of one parity: taps in a row, all taps, where the first lies in a window and which weights it has
struct Taps { int x, all, over, down, first; };
// p, q: rows and columns of windows; weight_y, weight_x: from tap to tap among weights; apart_y, apart_x: pixels of one
// parity; turn: tiles of a parity after which blocks go on to the next
struct Window {
    int channels, p, q, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, weight_y, weight_x, apart_y, apart_x, turn;
    Taps taps[PARITIES];
};
#endif

struct Args {
    Map a[SIDES], b, in[NIN * PARITIES + 1], out[NOUT * PARITIES + 1];
    const void *vec[NVEC + 1], *row[NROW + 1], *table[NTABLE + 1];
    float *part[NSUM + 1], *across[NACROSS + 1];  // the last of part: sums of a factor
    void* end[NEND + 1];
    const unsigned char* mask[NMASK + 1];
    unsigned char* packed[NPACKED + 1];
    int m, n, k, group, partials, begin[2];  // m: of one parity; partials: rows of part
    int mask_stride[NMASK + 1], packed_stride[NPACKED + 1];
#if WINDOW
    Window window;
#endif
#if SIDES > 1
    int side[SIDES];  // where each of them begins
#endif
};

// ---- windows --------------------------------------------------------------------------------------------------------

#if WINDOW
// The window, or the pixel of a parity, that a row is.
struct Pixel {
    int x, y, image;
    __device__ Pixel(const Window& w, int row) : x(row % w.q), y(row / w.q % w.p), image(row / (w.q * w.p)) {}
};
// Where a tile's windows begin, and what of them is fetched next.
struct Walk {
    const Taps& taps;
    int x, y, image, channel, tap_x, tap_y;
    __device__ Walk(const Window& w, int row, int parity) : taps(w.taps[parity]), channel(0), tap_x(0), tap_y(0) {
        const Pixel first(w, row);
        x = first.x * w.stride_x - w.padding_x, y = first.y * w.stride_y - w.padding_y, image = first.image;
    }
    __device__ __forceinline__ u16 over(const Window& w) const { return (u16)(taps.over + tap_x * w.dilation_x); }
    __device__ __forceinline__ u16 down(const Window& w) const { return (u16)(taps.down + tap_y * w.dilation_y); }
    // the tap among weights
    __device__ __forceinline__ int tap(const Window& w) const { return taps.first + tap_y * w.weight_y + tap_x * w.weight_x; }
    __device__ __forceinline__ void next(const Window& w) {
        channel += BK;
        if (channel < w.channels) return;
        channel = 0;
        if (++tap_x == taps.x) tap_x = 0, ++tap_y;
    }
};
// every tap has whole steps: beyond its channels the image is zero
__device__ __forceinline__ int steps_of(const Window& w, int parity) { return w.taps[parity].all * ((w.channels + BK - 1) / BK); }
// the number of a parity's pixel among all pixels
__device__ __forceinline__ int number_of(const Window& w, int row, int parity) {
    const Pixel at(w, row);
    const int y = (at.image * w.p + at.y) * w.apart_y + parity / w.apart_x;
    return (y * w.q + at.x) * w.apart_x + parity % w.apart_x;
}
#endif

// ---- numbers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float as_float(u32 x) { return __uint_as_float(x); }
__device__ __forceinline__ float bf16_low(u32 pair) { return as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float f16_low(u32 pair) {
    float r;
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;}" : "=f"(r) : "r"(pair));
    return r;
}
__device__ __forceinline__ float f16_high(u32 pair) { return f16_low(pair >> 16); }
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 f16_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float bf16_rounded(float x) { return bf16_low(bf16_pair(x, x)); }
__device__ __forceinline__ float f16_rounded(float x) { return f16_low(f16_pair(x, x)); }
__device__ __forceinline__ float exp2_(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float reciprocal_(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float exp_(float x) { return exp2_(x * 1.4426950408889634f); }
__device__ __forceinline__ float sigmoid_(float x) { return reciprocal_(1.0f + exp2_(x * -1.4426950408889634f)); }
__device__ __forceinline__ float tanh_(float x) {
    const float far = 1.0f - 2.0f * reciprocal_(exp2_(x * 2.8853900817779268f) + 1.0f);
    return fabsf(x) < 0.03f ? x - x * x * x * 0.33333333f : far;
}
// Abramowitz and Stegun 7.1.26: wrong by up to 6e-7 in f32; `tail` is exp(-x * x)
__device__ __forceinline__ float far_erf(float x, float tail) {
    const float t = reciprocal_(1.0f + 0.3275911f * fabsf(x));
    const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    return copysignf(1.0f - p * tail, x);
}
__device__ __forceinline__ float erf_(float x) {
    const float far = far_erf(x, exp_(-(x * x)));
    return fabsf(x) < 0.05f ? x * (1.1283791670955126f - 0.37612638903183754f * x * x) : far;
}
__device__ __forceinline__ float erf_beside_one(float x) { return far_erf(x, exp_(-(x * x))); }
__device__ __forceinline__ float tanh_beside_one(float x) {
    return 1.0f - 2.0f * reciprocal_(exp2_(x * 2.8853900817779268f) + 1.0f);
}
__device__ __forceinline__ float larger(float a, float b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ float smaller(float a, float b) { return a != a || a < b ? a : b; }
__device__ __forceinline__ float relu_(float x) { return x <= 0.0f ? 0.0f : x; }

// what is looked up is read where it is needed: a compiler that may would hold more of it than registers do
__device__ __forceinline__ float looked_up_f32(const void* from, u32 at) {
    float r;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(r) : "l"((const float*)from + at));
    return r;
}
__device__ __forceinline__ u32 looked_up_16(const void* from, u32 at) {
    u16 r;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"((const u16*)from + at));
    return r;
}
__device__ __forceinline__ float looked_up_bf16(const void* from, u32 at) { return bf16_low(looked_up_16(from, at)); }
__device__ __forceinline__ float looked_up_f16(const void* from, u32 at) { return f16_low(looked_up_16(from, at)); }

// ---- what follows the product ---------------------------------------------------------------------------------------

//GENERATED

// ---- barriers, copies, tensor cores ---------------------------------------------------------------------------------

__device__ __forceinline__ void make_barrier(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 bar, u32 phase) {
    asm volatile(
        "{\n.reg .pred p;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 0x989680;\n"
        "@p bra done_%=;\nbra again_%=;\ndone_%=:\n}" ::"r"(bar),
        "r"(phase)
        : "memory");
}
__device__ __forceinline__ void fetch(u32 to, const Map* map, u32 bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
}
#if WINDOW
// 128 windows, one after another, at one tap; zeros outside of the image
__device__ __forceinline__ void fetch_pixels(u32 to, const Map* map, u32 bar, int channel, int x, int y, int image, u16 over, u16 down) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(map), "r"(bar), "r"(channel), "r"(x), "r"(y), "r"(image), "h"(over), "h"(down)
        : "memory");
}
__device__ __forceinline__ void put_pixels(const Map* map, u32 from, int channel, int x, int y, int image) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from),
        "r"(channel), "r"(x), "r"(y), "r"(image)
        : "memory");
}
#endif
__device__ __forceinline__ void put(const Map* map, u32 from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(x),
                 "r"(y)
                 : "memory");
}
// 64 columns of a tile of what lies along rows and columns
__device__ __forceinline__ void fetch_beside(u32 to, const Map* map, u32 bar, const Args& args, int x, int y) {
#if PARITIES > 1
    const Pixel at(args.window, y);
    fetch_pixels(to, map, bar, x, at.x, at.y, at.image, 0, 0);
#else
    fetch(to, map, bar, x, y);
#endif
}
__device__ __forceinline__ void put_beside(const Map* map, u32 from, const Args& args, int x, int y) {
#if PARITIES > 1
    const Pixel at(args.window, y);
    put_pixels(map, from, x, at.x, at.y, at.image);
#else
    put(map, from, x, y);
#endif
}
__device__ __forceinline__ void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void hand_over(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// a matrix in shared memory, rows of 128 bytes swizzled; `lead`: from one 64 of its rows or columns to the next
__device__ __forceinline__ u64 matrix_at(u32 address, u32 lead) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
__device__ __forceinline__ void multiply(float (&d)[BN / 2], u64 a, u64 b, int add) {
#if BN == 128
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." FACTOR "." FACTOR " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
        "%61,%62,%63}, %64, %65, p, 1, 1, %67, %68;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48), EIGHT(d, 56)
        : "l"(a), "l"(b), "r"(add), "n"(ALONG_A), "n"(ALONG_B));
#else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." FACTOR "." FACTOR " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        " %32, %33, p, 1, 1, %35, %36;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
        : "l"(a), "l"(b), "r"(add), "n"(ALONG_A), "n"(ALONG_B));
#endif
}
__device__ __forceinline__ void settle(float (&d)[BN / 2]) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// half as many sums, each over twice as many rows
template <int half>
__device__ __forceinline__ void halve(float (&s)[16], int bit, int lane) {
    const bool upper = lane & bit;
#pragma unroll
    for (int w = 0; w < half; ++w) {
        const float given = upper ? s[w] : s[w + half], own = upper ? s[w + half] : s[w];
        s[w] = own + __shfl_xor_sync(0xFFFFFFFF, given, bit);
    }
}

struct Places {
    int rows, columns, tiles, group;
    __device__ explicit Places(const Args& args)
        : rows((args.m + BM - 1) / BM), columns((args.n + WIDTH - 1) / WIDTH), tiles(PARITIES * rows * columns), group(args.group) {}
    // rows of tiles in groups, so that neighbours in time read the same columns
    __device__ __forceinline__ void of(int tile, int& row, int& column) const {
        tile /= PARITIES;
        const int across = group * columns, first = tile / across * group, in = tile % across;
        const int high = rows - first < group ? rows - first : group;
        row = first + in % high;
        column = in / high;
    }
    // tiles of the same pixels, whose neighbours they share, are made at once; a block makes all parities, in turn
    __device__ __forceinline__ int parity(const Args& args, int tile) const {
#if PARITIES > 1
        return (tile + tile / PARITIES / args.window.turn) % PARITIES;
#else
        return 0;
#endif
    }
};

// the row of a tensor that a row of the product is
__device__ __forceinline__ int number_of(const Args& args, int y, int parity) {
#if PARITIES > 1
    return number_of(args.window, y, parity);
#else
    return y;
#endif
}
// the bits that a thread has of a row; of columns beyond the edge none
__device__ __forceinline__ u32 bits_of(const Args& args, const unsigned char* from, int stride, int y, int parity, int x, int lane) {
    u32 found = 0;
#pragma unroll
    for (int g = 0; g < WIDTH / 32; ++g)
        if (!RAGGED || (y < args.m && x + g * 32 < args.n))
            found |= (u32)__ldg(from + (u64)number_of(args, y, parity) * stride + (x / 32 + g) * 4 + lane % 4) << 8 * g;
    return found;
}
__device__ __forceinline__ void keep_bits(const Args& args, unsigned char* to, int stride, int y, int parity, int x, int lane, u32 bits) {
#pragma unroll
    for (int g = 0; g < WIDTH / 32; ++g)
        if (!RAGGED || (y < args.m && x + g * 32 < args.n))
            to[(u64)number_of(args, y, parity) * stride + (x / 32 + g) * 4 + lane % 4] = (unsigned char)(bits >> 8 * g);
}

// ---- the product ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(384, 1) product(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
#if WINDOW
    const int steps = steps_of(args.window, 0);
#else
    const int steps = (args.k + BK - 1) / BK;
#endif
    const u32 stages_a = base, stages_b = base + STAGES * STAGE, slots = stages_b + (STAYS ? steps : STAGES) * STAGE_B;
    const u32 sums = slots + 2 * (NIN * AHEAD + OWN * DEPTH) * SLOT, bars = sums + 2 * NSUM * 1024;
    const u32 full = bars, empty = bars + 8 * STAGES, beside = bars + 16 * STAGES;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    const Places places(args);
#if PARITIES > 1
    auto steps_at = [&](int tile) { return steps_of(args.window, places.parity(args, tile)); };
#else
    auto steps_at = [&](int) { return steps; };
#endif
    if (threadIdx.x == 0) {
        if (STAYS) make_barrier(beside + 16, 1);
        for (int i = 0; i < STAGES; ++i) make_barrier(full + 8 * i, 1), make_barrier(empty + 8 * i, ASIDE ? 6 : 4);
        make_barrier(beside, 1), make_barrier(beside + 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (thread == 0) {
            u32 stage = 0, phase = 1;
#if STAYS
            expect(beside + 16, steps * STAGE_B);
            Walk weights(args.window, 0, 0);
            for (int k = 0; k < steps; ++k, weights.next(args.window))
                fetch(stages_b + k * STAGE_B, &args.b, beside + 16, weights.tap(args.window) * args.window.channels + weights.channel, 0);
#endif
            for (int tile = blockIdx.x; tile < places.tiles; tile += gridDim.x) {
                int row, column;
                places.of(tile, row, column);
                [[maybe_unused]] const int one = column * WIDTH + args.begin[0];
                [[maybe_unused]] const int other = PARTS == 1 ? one + 64 : column * WIDTH + args.begin[1];
#if WINDOW
                Walk walk(args.window, row * BM, places.parity(args, tile));
#endif
                for (int k = 0, own = steps_at(tile); k < own; ++k) {
                    wait(empty + 8 * stage, phase);
                    const u32 bar = full + 8 * stage, a = stages_a + stage * STAGE, b = stages_b + stage * STAGE_B;
                    expect(bar, STAGE + (STAYS ? 0 : STAGE_B));
#if WINDOW
                    const int tap = walk.tap(args.window);
                    fetch_pixels(a, args.a, bar, walk.channel, walk.x, walk.y, walk.image, walk.over(args.window), walk.down(args.window));
                    if (ALONG_B) {  // a row of weights has the columns of each tap
                        fetch(b, &args.b, bar, tap * args.n + one, walk.channel);
                        if (BN > 64) fetch(b + STAGE / 2, &args.b, bar, tap * args.n + other, walk.channel);
                    } else if (!STAYS) {
                        fetch(b, &args.b, bar, tap * args.window.channels + walk.channel, one);
                    }
                    walk.next(args.window);
#else
                    const Map* from = args.a;
                    int at = k * BK;
#if SIDES > 1
#pragma unroll
                    for (int i = 1; i < SIDES; ++i)
                        if (k * BK >= args.side[i]) from = args.a + i, at = k * BK - args.side[i];
#endif
                    if (ALONG_A) {
                        fetch(a, from, bar, row * BM, at);
                        fetch(a + STAGE / 2, from, bar, row * BM + 64, at);
                    } else {
                        fetch(a, from, bar, at, row * BM);
                    }
                    if (ALONG_B) {
                        fetch(b, &args.b, bar, one, k * BK);
                        fetch(b + STAGE / 2, &args.b, bar, other, k * BK);
                    } else {
                        fetch(b, &args.b, bar, k * BK, one);
                        if (PARTS > 1) fetch(b + STAGE / 2, &args.b, bar, k * BK, other);
                    }
#endif
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        } else if (ASIDE && (warp == 1 || warp == 2)) {  // 64 rows or columns each; tiles of the same share what is summed
            u32 stage = 0, phase = 0;
            for (int tile = blockIdx.x; tile < places.tiles; tile += gridDim.x) {
                int row, column;
                places.of(tile, row, column);
                const int turns = ASIDE == 1 ? places.columns : places.rows;
                int turn = ASIDE == 1 ? column : row;
                float s[8] = {0, 0, 0, 0, 0, 0, 0, 0};
                for (int k = 0; k < steps; ++k) {
                    wait(full + 8 * stage, phase);
                    const u32 from = (ASIDE == 1 ? stages_a : stages_b) + stage * STAGE + (warp - 1) * (STAGE / 2);
                    if (turn == 0)
#pragma unroll 2
                        for (int r = lane / 8; r < BK; r += 8) {  // two rows at once: one is added up while the other comes
                            u32 p[8];
#pragma unroll
                            for (int i = 0; i < 8; i += 4)
                                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                             : "=r"(p[i]), "=r"(p[i + 1]), "=r"(p[i + 2]), "=r"(p[i + 3])
                                             : "r"(from + (r + i) * 128 + ((lane % 8 ^ (r + i & 7)) << 4)));
#pragma unroll
                            for (int i = 0; i < 8; ++i) s[2 * (i & 3)] += FACTOR_LOW(p[i]), s[2 * (i & 3) + 1] += FACTOR_HIGH(p[i]);
                        }
                    __syncwarp();
                    if (lane == 0) arrive(empty + 8 * stage);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                    turn = turn == 0 ? turns - 1 : turn - 1;
                }
                const int first = (ASIDE == 1 ? row * BM : column * BN) + (warp - 1) * 64 + lane % 8 * 8;
                const int length = ASIDE == 1 ? args.m : args.n, part = ASIDE == 1 ? column : row;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    s[i] += __shfl_xor_sync(0xFFFFFFFF, s[i], 8);
                    s[i] += __shfl_xor_sync(0xFFFFFFFF, s[i], 16);
                    if (lane < 8 && first + i < length) args.part[NSUM][(u64)part * length + first + i] = s[i];
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const u32 own = slots + group * (NIN * AHEAD + OWN * DEPTH) * SLOT, ready = beside + 8 * group;
        const int matrix = lane / 8, first = warp * 16 + (matrix & 1) * 8 + lane % 8;
        u32 turn = 0;
        [[maybe_unused]] float kept[NSUM + 1][PIECES];  // sums of all tiles, where these are one below another
#pragma unroll
        for (int i = 0; i < NSUM * PIECES; ++i) kept[i / PIECES][i % PIECES] = 0;
        if (STAYS) wait(beside + 16, 0);
        if (group == 1) hand_over(1, 256);
        auto read_ahead = [&](int tile, int piece) {
            int row, column;
            places.of(tile, row, column);
            const int parity = places.parity(args, tile);
            expect(ready, AHEAD * NIN * SLOT);
#pragma unroll
            for (int c = 0; c < AHEAD; ++c)
#pragma unroll
                for (int i = 0; i < NIN; ++i)
                    fetch_beside(own + (c * NIN + i) * SLOT, &args.in[parity * NIN + i], ready, args, column * WIDTH + (piece + c) * 64, row * BM);
        };
        if (NIN && thread == 0 && blockIdx.x + group * gridDim.x < places.tiles) read_ahead(blockIdx.x + group * gridDim.x, 0);
        int done = group * steps_at(blockIdx.x);
        for (int tile = blockIdx.x + group * gridDim.x; tile < places.tiles;
             done += steps_at(tile) + steps_at(tile + gridDim.x), tile += 2 * gridDim.x) {
            float total[2][BN / 2];
            int row, column;
            places.of(tile, row, column);
            const int parity = places.parity(args, tile), multiplied = steps_at(tile);
            const int strip = row * PARITIES + parity;  // (which is all that is known of both till the tile is put)
            u32 stage = done % STAGES, phase = done / STAGES & 1, last = 0;
            float high[NROW + 1][4];
            heights(args, row * BM + warp * 16 + lane / 4, high);
            u32 masks[NMASK + 1][4], told[NPACKED + 1][4];
            const int upmost = row * BM + warp * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < 4 * NMASK; ++i)
                masks[i / 4][i % 4] = bits_of(args, args.mask[i / 4], args.mask_stride[i / 4], upmost + (i / 2 & 1) * 64 + (i & 1) * 8, parity, column * WIDTH, lane);
#pragma unroll
            for (int i = 0; i < 4 * NPACKED; ++i) told[i / 4][i % 4] = 0;
            sync(1 + group, 256);
            for (int k = 0; k < multiplied; ++k) {
                wait(full + 8 * stage, phase);
                const u64 a = matrix_at(stages_a + stage * STAGE, ALONG_A ? STAGE / 2 : 16);
                const u64 b = matrix_at(stages_b + (STAYS ? k : stage) * STAGE_B, ALONG_B ? STAGE / 2 : 16);
                settle(total[0]), settle(total[1]);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int s = 0; s < BK / 16; ++s) {
                    multiply(total[0], a + (ALONG_A ? 128 : 2) * s, b + (ALONG_B ? 128 : 2) * s, k + s);
                    multiply(total[1], a + (ALONG_A ? 128 : 2) * s + STAGE / 32, b + (ALONG_B ? 128 : 2) * s, k + s);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                settle(total[0]), settle(total[1]);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (k && lane == 0) arrive(empty + 8 * last);
                last = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            if (tile + gridDim.x < places.tiles) hand_over(2 - group, 256);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            settle(total[0]), settle(total[1]);
            if (lane == 0) arrive(empty + 8 * last);
            float across[NACROSS + 1][4];
#pragma unroll
            for (int i = 0; i < 4 * NACROSS; ++i) across[i / 4][i % 4] = 0;
#pragma unroll
            for (int c = 0; c < PIECES; ++c) {
                const int x = column * WIDTH + c * 64;
                u32 slot[NIN + NOUT + 1];
#pragma unroll
                for (int i = 0; i < NIN || i < NOUT; ++i)
                    slot[i] = own + (i < NIN ? c % AHEAD * NIN + i : NIN * AHEAD + (i - NIN) * DEPTH + c % DEPTH) * SLOT;
                if (NIN && c % AHEAD == 0) wait(ready, turn), turn ^= 1;
                if (OWN) {  // what was put from here before has left
                    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(DEPTH - 1) : "memory");
                    sync(3 + group, 128);
                }
                float added[NSUM + 1][16];
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    float known[NVEC + 1][4];
                    vectors(args, x + j * 8 + lane % 4 * 2, known, 0);
                    vectors(args, x + j * 8 + 8 + lane % 4 * 2, known, 2);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 at = (first + h * 64) * 128 + (((j + (matrix >> 1)) ^ (lane & 7)) << 4);
                        u32 in[NIN + 1][4], out[NOUT + 1][4];
#pragma unroll
                        for (int i = 0; i < NIN; ++i)
                            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                                         : "=r"(in[i][0]), "=r"(in[i][1]), "=r"(in[i][2]), "=r"(in[i][3])
                                         : "r"(slot[i] + at));
#pragma unroll
                        for (int q = 0; q < 4; ++q) {  // rows of 8: q & 1, columns of 8: q >> 1
                            float sum[2][NSUM + 1], made[2][NOUT + 1];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                float v[TURN ? 2 : PARTS], read[NIN + 1], b[NVEC + 1], r[NROW + 1], over[NACROSS + 1];
                                const int at = x + (j + (q >> 1)) * 8 + lane % 4 * 2 + e;
                                const int up = row * BM + h * 64 + warp * 16 + (q & 1) * 8 + lane / 4, eight = c * 8 + j + (q >> 1);
#pragma unroll
                                for (int p = 0; p < (TURN ? 2 : PARTS); ++p)
                                    v[p] = total[h][(TURN ? (eight & ~(TURN / 8)) + p * (TURN / 8) : eight + p * 8) * 4 + (q & 1) * 2 + e];
                                unpack(in, q, e, read);
#pragma unroll
                                for (int i = 0; i < NVEC; ++i) b[i] = known[i][(q >> 1) * 2 + e];
#pragma unroll
                                for (int i = 0; i < NROW; ++i) r[i] = high[i][h * 2 + (q & 1)];
                                bool known_to_be[NMASK + 1], tells[NPACKED + 1];
#pragma unroll
                                for (int i = 0; i < NMASK; ++i) known_to_be[i] = masks[i][h * 2 + (q & 1)] >> (2 * eight + e) & 1;
                                around(args, v, read, b, r, known_to_be, up, at, TURN && eight & TURN / 8, made[e], sum[e], over, tells);
#pragma unroll
                                for (int i = 0; i < NPACKED; ++i) told[i][h * 2 + (q & 1)] |= (u32)tells[i] << (2 * eight + e);
#pragma unroll
                                for (int i = 0; i < NACROSS; ++i) across[i][h * 2 + (q & 1)] += RAGGED && at >= args.n ? 0.0f : over[i];
                            }
                            pack(made[0], made[1], out, q);
#pragma unroll
                            for (int i = 0; i < NSUM; ++i)
#pragma unroll
                                for (int e = 0; e < 2; ++e) {
                                    const bool outside = RAGGED && row * BM + h * 64 + warp * 16 + (q & 1) * 8 + lane / 4 >= args.m;
                                    const float one = outside ? 0.0f : sum[e][i];
                                    float& to = added[i][(j + (q >> 1)) * 2 + e];
                                    to = h == 0 && (q & 1) == 0 ? one : to + one;
                                }
                        }
#pragma unroll
                        for (int i = 0; i < NOUT; ++i)
                            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(slot[i] + at),
                                         "r"(out[i][0]), "r"(out[i][1]), "r"(out[i][2]), "r"(out[i][3])
                                         : "memory");
                    }
                }
                if (NSUM && !OWN) sync(3 + group, 128);  // the sums of before were read
#pragma unroll
                for (int i = 0; i < NSUM; ++i) {  // over the eight rows that lanes have, by halves
                    halve<8>(added[i], 16, lane), halve<4>(added[i], 8, lane), halve<2>(added[i], 4, lane);
                    const int j = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(sums + ((group * NSUM + i) * 4 + warp) * 256 + (j * 8 + lane % 4 * 2) * 4),
                                 "f"(added[i][0]), "f"(added[i][1])
                                 : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                sync(3 + group, 128);
                if (thread == 0) {
#pragma unroll
                    for (int i = 0; i < NOUT; ++i) put_beside(&args.out[strip % PARITIES * NOUT + i], slot[i], args, x, strip / PARITIES * BM);
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                }
#pragma unroll
                for (int i = 0; i < NSUM; ++i)
                    if (thread < 64 && (!RAGGED || x + thread < args.n)) {
                        float s = 0;
#pragma unroll
                        for (int w = 0; w < 4; ++w) {
                            float one;
                            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(sums + ((group * NSUM + i) * 4 + w) * 256 + thread * 4) : "memory");
                            s += one;
                        }
                        if (NARROW)
                            kept[i][c] += s;
                        else
                            args.part[i][(u64)strip * args.n + x + thread] = s;
                    }
                if (NIN && (c + 1) % AHEAD == 0 && thread == 0) {
                    const int next = c + 1 < PIECES ? tile : tile + 2 * gridDim.x;
                    if (next < places.tiles) {
                        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                        read_ahead(next, (c + 1) % PIECES);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4 * NPACKED; ++i)
                keep_bits(args, args.packed[i / 4], args.packed_stride[i / 4], upmost + (i / 2 & 1) * 64 + (i & 1) * 8, parity, column * WIDTH, lane, told[i / 4][i % 4]);
#pragma unroll
            for (int i = 0; i < NACROSS; ++i)
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    float s = across[i][t];
                    s += __shfl_xor_sync(0xFFFFFFFF, s, 1);
                    s += __shfl_xor_sync(0xFFFFFFFF, s, 2);
                    const int y = row * BM + (t >> 1) * 64 + warp * 16 + (t & 1) * 8 + lane / 4;
                    if (lane % 4 == 0 && (!RAGGED || y < args.m)) args.across[i][(u64)column * args.m + y] = s;
                }
        }
#pragma unroll
        for (int c = 0; c < NARROW * PIECES; ++c)
#pragma unroll
            for (int i = 0; i < NSUM; ++i)
                if (thread < 64 && (!RAGGED || c * 64 + thread < args.n))
                    args.part[i][(u64)(2 * blockIdx.x + group) * args.n + c * 64 + thread] = kept[i][c];
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// ---- sums over rows and columns -------------------------------------------------------------------------------------

#define ADDERS 32

// one sum over partial sums, for 32 of `length`: whole in the first thread of each warp
__device__ __forceinline__ float added_up(const float* part, int rows, int length, float (&held)[ADDERS][33]) {
    const int x = threadIdx.x % 32, y = threadIdx.x / 32, at = blockIdx.x * 32 + x;
    float s = 0;
    if (at < length)
        for (int r = y; r < rows; r += 8 * ADDERS) {
            float some[8];  // all are under way before the first is added
#pragma unroll
            for (int i = 0; i < 8; ++i) some[i] = r + i * ADDERS < rows ? part[(u64)(r + i * ADDERS) * length + at] : 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) s += some[i];
        }
    held[y][x] = s;
    __syncthreads();
    s = held[x][y];
#pragma unroll
    for (int other = 16; other; other /= 2) s += __shfl_xor_sync(0xFFFFFFFF, s, other);
    return s;
}

extern "C" __global__ void __launch_bounds__(32 * ADDERS) finish(const __grid_constant__ Args args) {
    __shared__ float held[NSUM + 1][ADDERS][33];
    const int at = blockIdx.x * 32 + threadIdx.x / 32;
    float s[NSUM + 1];
#pragma unroll
    for (int i = 0; i < NSUM; ++i) s[i] = added_up(args.part[i], args.partials, args.n, held[i]);
    if (threadIdx.x % 32 == 0 && at < args.n) ending(args, at, s);
}

extern "C" __global__ void __launch_bounds__(32 * ADDERS) finish_across(const __grid_constant__ Args args) {
    __shared__ float held[NACROSS + 1][ADDERS][33];
    const Places places(args);
    const int at = blockIdx.x * 32 + threadIdx.x / 32;
    float s[NACROSS + 1];
#pragma unroll
    for (int i = 0; i < NACROSS; ++i) s[i] = added_up(args.across[i], places.columns, args.m, held[i]);
    if (threadIdx.x % 32 == 0 && at < args.m) crossing(args, at, s);
}

extern "C" __global__ void __launch_bounds__(32 * ADDERS) finish_aside(const __grid_constant__ Args args) {
    __shared__ float held[ADDERS][33];
    const Places places(args);
    const int at = blockIdx.x * 32 + threadIdx.x / 32, length = ASIDE == 1 ? args.m : args.n;
    const float s = added_up(args.part[NSUM], ASIDE == 1 ? places.columns : places.rows, length, held);
    if (threadIdx.x % 32 == 0 && at < length) aside(args, at, &s);
}
