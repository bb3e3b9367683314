// Matrix products of f32 by vectors, of matrices that lie in any way: result[z, m, n] = sum of left[z, m, k] *
// right[z, k, n], plus a bias along n. Columns of `right` are put side by side in panels, as many as fit a cache; then
// each thread computes tiles of its rows (or, where these are few, of its columns) in registers.
// How an element is summed does not depend on the number of threads.

#if defined(__AVX512F__)
constexpr int LANES_OF_TILE = 16, HEIGHT = 14;
#elif defined(__AVX__)
constexpr int LANES_OF_TILE = 8, HEIGHT = 6;
#elif defined(__aarch64__)
constexpr int LANES_OF_TILE = 4, HEIGHT = 12;
#else
constexpr int LANES_OF_TILE = 4, HEIGHT = 6;
#endif
// a tile has up to HEIGHT rows and up to PANEL columns; so many terms are summed before it is written; so many panels are
// there at a time, and so many tiles of rows where the left matrix does not lie by rows (Python knows DEPTH and PANELS)
constexpr int PANEL = 2 * LANES_OF_TILE, DEPTH = 512, PANELS = 128, TILES = 6;
typedef float Lanes __attribute__((vector_size(4 * LANES_OF_TILE)));

struct Product { i64 z, m, n, k, az, am, ak, bz, bk, bn, cz, cm, biased; };

extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

// the first columns of a tile's rows
static void __attribute__((noinline)) write_edge(const float* rows, i64 R, i64 width, const float* more, i64 step, float* out, i64 cm, i64 columns) {
  for (i64 r = 0; r < R; ++r)
    for (i64 x = 0; x < columns; ++x) out[r * cm + x] = rows[r * width + x] + (more ? more[r * step + x] : 0);
}

// R rows by W vectors of columns; `left` is (row, k) at row * am + k where BY_ROWS, else at k * R + row. What is added to
// the sums lies at `more`, row by row with a step; nothing where it is null.
template <int R, int W, bool BY_ROWS>
FUSED static void tile(i64 K, const float* left, i64 am, const float* right, const float* more, i64 step, float* out, i64 cm, i64 columns) {
  FUSE
  Lanes sums[R][W] = {};
  const float* third[(R + 2) / 3];  // of three rows each, which one register and its step can tell
  for (int r = 0; r < R; r += 3) third[r / 3] = left + r * am;
  for (i64 k = 0; k < K; ++k) {
    Lanes b[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) __builtin_memcpy(&b[w], right + k * PANEL + w * LANES_OF_TILE, sizeof(Lanes));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes a = Lanes{} + (BY_ROWS ? *(third[r / 3] + r % 3 * am) : left[k * R + r]);
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) sums[r][w] += a * b[w];
    }
    if (BY_ROWS)
#pragma GCC unroll 16
      for (int r = 0; r < R; r += 3) ++third[r / 3];
  }
  if (columns == W * LANES_OF_TILE) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        if (more) {
          Lanes x;
          __builtin_memcpy(&x, more + r * step + w * LANES_OF_TILE, sizeof(Lanes));
          sums[r][w] += x;
        }
        __builtin_memcpy(out + r * cm + w * LANES_OF_TILE, &sums[r][w], sizeof(Lanes));
      }
    return;
  }
  float rows[R * W * LANES_OF_TILE];
  __builtin_memcpy(rows, sums, sizeof(rows));
  write_edge(rows, R, W * LANES_OF_TILE, more, step, out, cm, columns);
}

typedef void (*Tile)(i64, const float*, i64, const float*, const float*, i64, float*, i64, i64);
template <int R> struct Tiles {
  static Tile of(int rows, bool narrow, bool by_rows) {
    if (rows != R) return Tiles<R - 1>::of(rows, narrow, by_rows);
    if (narrow) return by_rows ? tile<R, 1, true> : tile<R, 1, false>;
    return by_rows ? tile<R, 2, true> : tile<R, 2, false>;
  }
};
template <> struct Tiles<0> { static Tile of(int, bool, bool) { return nullptr; } };

// out[k * width + x] = in[x * sx + k * sk] of `count` lines, and zeros up to `width` of them
static void lay(const float* in, i64 sx, i64 sk, i64 count, i64 K, i64 width, float* out) {
  i64 x = 0;
  if (sx == 1) {
    for (i64 k = 0; k < K; ++k) {
      for (i64 x = 0; x < count; ++x) out[k * width + x] = in[k * sk + x];
      for (i64 x = count; x < width; ++x) out[k * width + x] = 0;
    }
    return;
  }
#if defined(__AVX__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
  typedef float Eight __attribute__((vector_size(32)));
  for (; sk == 1 && x + 8 <= count; x += 8) {  // squares of eight are turned in registers
    i64 k = 0;
    for (; k + 8 <= K; k += 8) {
      Eight a[8], b[8];
      for (int i = 0; i < 8; ++i) __builtin_memcpy(&a[i], in + (x + i) * sx + k, 32);
      for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
      for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
          a[i + 2 * j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
          a[i + 2 * j + 1] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
      for (int i = 0; i < 4; ++i) {
        b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[i + 4] = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      }
      for (int i = 0; i < 8; ++i) __builtin_memcpy(out + (k + i) * width + x, &b[i], 32);
    }
    for (; k < K; ++k)
      for (int i = 0; i < 8; ++i) out[k * width + x + i] = in[(x + i) * sx + k];
  }
#endif
  for (; x < width; ++x)
    for (i64 k = 0; k < K; ++k) out[k * width + x] = x < count ? in[x * sx + k * sk] : 0;
}

// what a product is made of, in order: batches and panels that are there at a time, and terms that are summed
struct Piece { i64 z0, batches, p0, width, k0, K; bool first; };

// the tiles of one thread in a piece: of its rows, or of its columns where rows are few
static void tiles_of(const Product& s, const Piece& at, const float* left, const float* panels, const float* bias, float* result, float* own) {
  const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads(), down = (s.m + HEIGHT - 1) / HEIGHT;
  // rows that lie a multiple of 2 KB apart would drive each other out of the first cache
  const bool by_rows = s.ak == 1 && s.am % 512 != 0, rows = at.batches * down >= 8 * threads || at.batches * down >= at.width;
  const i64 all = at.batches * down, last = rows ? all * (thread + 1) / threads : all;
  const i64 from = rows ? 0 : at.width * thread / threads, end = rows ? at.width : at.width * (thread + 1) / threads;
  for (i64 t0 = rows ? all * thread / threads : 0, t1; t0 < last; t0 = t1) {
    const i64 z = t0 / down;
    const float* const a = left + (at.z0 + z) * s.az + at.k0 * s.ak;
    t1 = least(least(t0 + TILES, last), (z + 1) * down);
    for (i64 t = t0; t < t1 && !by_rows; ++t) {
      const i64 row = s.m * (t - z * down) / down, R = s.m * (t - z * down + 1) / down - row;
      lay(a + row * s.am, s.am, s.ak, R, at.K, R, own + (t - t0) * HEIGHT * at.K);
    }
    for (i64 p = from; p < end; ++p) {
      const i64 x = (at.p0 + p) * PANEL, columns = least(PANEL, s.n - x);
      for (i64 t = t0; t < t1; ++t) {
        const i64 row = s.m * (t - z * down) / down, R = s.m * (t - z * down + 1) / down - row;
        float* const out = result + (at.z0 + z) * s.cz + row * s.cm + x;
        const float* const more = !at.first ? out : bias ? bias + x : nullptr;
        const float* const here = by_rows ? a + row * s.am : own + (t - t0) * HEIGHT * at.K;
        Tiles<HEIGHT>::of(R, columns <= LANES_OF_TILE, by_rows)(
            at.K, here, s.am, panels + (z * at.width + p) * at.K * PANEL, more, at.first ? 0 : s.cm, out, s.cm, columns);
      }
    }
  }
}

extern "C" int kernel_name(void** tensors) {
  const Product& s = *(const Product*)tensors[0];
  const float* const left = (const float*)tensors[1];
  const float* const right = (const float*)tensors[2];
  float* const result = (float*)tensors[3];
  float* const panels = (float*)tensors[4];
  const float* const bias = s.biased ? (const float*)tensors[5] : nullptr;
  const i64 across = (s.n + PANEL - 1) / PANEL, parts = (s.k + DEPTH - 1) / DEPTH;
  const i64 width = least(across, PANELS), batches = least(s.z, PANELS / width);
#pragma omp parallel
  {
    alignas(64) float own[TILES * HEIGHT * DEPTH];
    for (i64 z0 = 0; z0 < s.z; z0 += batches)
      for (i64 p0 = 0; p0 < across; p0 += width)
        for (i64 part = 0; part < parts; ++part) {
          const i64 k0 = s.k * part / parts, K = s.k * (part + 1) / parts - k0;
          const Piece at = {z0, least(batches, s.z - z0), p0, least(width, across - p0), k0, K, part == 0};
#pragma omp for schedule(static)
          for (i64 task = 0; task < at.batches * at.width; ++task) {
            const i64 x = (p0 + task % at.width) * PANEL;
            const float* const b = right + (z0 + task / at.width) * s.bz + k0 * s.bk + x * s.bn;
            lay(b, s.bn, s.bk, least(PANEL, s.n - x), K, PANEL, panels + task * K * PANEL);
          }
          tiles_of(s, at, left, panels, bias, result, own);
#pragma omp barrier
        }
  }
  return 0;
}
