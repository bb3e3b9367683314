// Matrix products of f32 by vectors, of matrices that lie in any way: result[z, m, n] = sum of left[z, m, k] *
// right[z, k, n], plus a bias along n. Columns of `right` are put side by side in panels, as many as fit a cache; then
// each thread computes tiles of its rows (or, where these are few, of its columns) in registers.
// How an element is summed does not depend on the number of threads.

// so many terms are summed before a tile is written; so many panels are there at a time, and so many tiles of rows where
// the left matrix does not lie by rows (Python knows DEPTH and PANELS)
constexpr int DEPTH = 512, PANELS = 128, TILES = 6;

struct Product { i64 what, z, m, n, k, az, am, ak, bz, bk, bn, cz, cm, biased; };

extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

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

static void multiply(const Product& s, const float* left, const float* right, float* result, float* panels, const float* bias) {
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
}

static void product(void** tensors) {
  const Product& s = *(const Product*)tensors[0];
  const float* const bias = s.biased ? (const float*)tensors[5] : nullptr;
  multiply(s, (const float*)tensors[1], (const float*)tensors[2], (float*)tensors[3], (float*)tensors[4], bias);
}
