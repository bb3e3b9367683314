// Tiles of matrix products of f32: computed in registers, from factors that lie by rows or were put side by side.
// What products (`product.h`) and attention (`attention.h`) are made of.

#if defined(__AVX512F__)
constexpr int LANES_OF_TILE = 16, HEIGHT = 14;
#elif defined(__AVX__)
constexpr int LANES_OF_TILE = 8, HEIGHT = 6;
#elif defined(__aarch64__)
constexpr int LANES_OF_TILE = 4, HEIGHT = 12;
#else
constexpr int LANES_OF_TILE = 4, HEIGHT = 6;
#endif
// a tile has up to HEIGHT rows and up to PANEL columns
constexpr int PANEL = 2 * LANES_OF_TILE;
typedef float Lanes __attribute__((vector_size(4 * LANES_OF_TILE)));

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
