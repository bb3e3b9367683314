// Attention and its gradients in f32, for heads whose rows are neighbours in memory: softmax(scale * q k^T) v, where row i
// sees keys 0 to i only if causal. Keys and values are put side by side once; then rows of queries, so many that their
// scores fit the second cache, go through all that is done with them. Gradients of keys and values are added up rows by
// rows, by the one thread that has their head: in the same order with any number of threads.

struct Heads { i64 batch, head, row; };  // steps in memory; those of the log-sum-exp have no columns
struct Attention {
  i64 what, batch, heads, shared, L, S, D, E, causal;
  double scale;
  Heads q, k, v, out, sums, dout, dq, dk, dv;
};

// of some rows of queries, with their scores: numbers and rows at most; and columns of a head (Python knows WIDEST)
constexpr i64 SCORES = 32768, ROWS = 4 * HEIGHT, WIDEST = 256;

INLINE i64 up(i64 n, i64 to) { return (n + to - 1) / to * to; }
// a row of scores lies this far from the next: never a power of two, whose rows would drive each other out of the cache
INLINE i64 row_of_scores(const Attention& s) { return up(s.S, PANEL) + LANES_OF_TILE; }
INLINE i64 rows_at_once(const Attention& s) { return most(1, least(ROWS, SCORES / row_of_scores(s))); }
INLINE i64 seen_by(const Attention& s, i64 rows) { return s.causal ? least(rows, s.S) : s.S; }
INLINE const float* at(const float* p, const Heads& h, i64 z, i64 head, i64 row) { return p + z * h.batch + head * h.head + row * h.row; }
INLINE float* at(float* p, const Heads& h, i64 z, i64 head, i64 row) { return p + z * h.batch + head * h.head + row * h.row; }

// columns side by side: `columns` of them, with K terms each, at x * sx + k * sk
static void lay_all(const float* in, i64 sx, i64 sk, i64 columns, i64 K, float* panels) {
  for (i64 x = 0; x < columns; x += PANEL) lay(in + x * sx, sx, sk, least(PANEL, columns - x), K, PANEL, panels + x * K);
}

// out = left * right, or out += where more: `right` is in panels that have `depth` terms, of which K count. Rows of `left`
// are `step` apart; or its columns are, if turned, and then `own` has room for a tile of rows.
static void multiply(i64 m, i64 n, i64 K, const float* left, i64 step, bool turned, const float* right, i64 depth, bool more, float* out, i64 cm, float* own) {
  const i64 down = (m + HEIGHT - 1) / HEIGHT;
  for (i64 t = 0; t < down; ++t) {
    const i64 row = m * t / down, R = m * (t + 1) / down - row;
    if (turned) lay(left + row, 1, step, R, K, R, own);
    for (i64 x = 0; x < n; x += PANEL) {
      float* const to = out + row * cm + x;
      Tiles<HEIGHT>::of(R, n - x <= LANES_OF_TILE, !turned)(
          K, turned ? own : left + row * step, step, right + x * depth, more ? to : nullptr, cm, to, cm, least(PANEL, n - x));
    }
  }
}

// exp(scale * score - top) of the first `seen` scores of a row, zeros behind; their sum
INLINE float powers(float* row, i64 seen, i64 end, float scale, float top) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (i64 x = 0; x < seen; ++x) {
    row[x] = exp_(fma_(row[x], scale, -top));
    sum += row[x];
  }
  for (i64 x = seen; x < end; ++x) row[x] = 0;
  return sum;
}

static void attention(void** tensors) {
  const Attention& s = *(const Attention*)tensors[0];
  const float* const q = (const float*)tensors[1];
  const float* const k = (const float*)tensors[2];
  const float* const v = (const float*)tensors[3];
  float* const out = (float*)tensors[4];
  float* const sums = (float*)tensors[5];
  float* const packed = (float*)tensors[6];
  const i64 others = s.heads / s.shared, keys = up(s.S, PANEL) * s.D, values = up(s.E, PANEL) * s.S;
  const i64 step = row_of_scores(s), count = rows_at_once(s), blocks = (s.L + count - 1) / count;
  const float scale = (float)s.scale;
#pragma omp parallel
  {
    alignas(64) float scores[SCORES + LANES_OF_TILE];
#pragma omp for schedule(static)
    for (i64 task = 0; task < s.batch * others; ++task) {
      float* const own = packed + task * (keys + values);
      lay_all(at(k, s.k, task / others, task % others, 0), s.k.row, 1, s.S, s.D, own);
      lay_all(at(v, s.v, task / others, task % others, 0), 1, s.v.row, s.E, s.S, own + keys);
    }
#pragma omp for schedule(static)
    for (i64 task = 0; task < s.batch * s.heads * blocks; ++task) {
      const i64 z = task / blocks / s.heads, head = task / blocks % s.heads, first = task % blocks * count;
      const i64 rows = least(count, s.L - first), end = seen_by(s, first + rows);
      const float* const own = packed + (z * others + head / s.shared) * (keys + values);
      multiply(rows, up(end, PANEL), s.D, at(q, s.q, z, head, first), s.q.row, false, own, s.D, false, scores, step, nullptr);
      for (i64 r = 0; r < rows; ++r) {
        float* const row = scores + r * step;
        const i64 seen = seen_by(s, first + r + 1);
        float top = -INF_F;
#pragma omp simd reduction(max : top)
        for (i64 x = 0; x < seen; ++x) top = row[x] * scale > top ? row[x] * scale : top;
        const float sum = powers(row, seen, end, scale, top), share = 1 / sum;
        for (i64 x = 0; x < seen; ++x) row[x] *= share;
        *at(sums, s.sums, z, head, first + r) = top + log_(sum);
      }
      multiply(rows, s.E, end, scores, step, false, own + keys, s.S, false, at(out, s.out, z, head, first), s.out.row, nullptr);
    }
  }
}

static void attention_gradients(void** tensors) {
  const Attention& s = *(const Attention*)tensors[0];
  const float* const dout = (const float*)tensors[1];
  const float* const q = (const float*)tensors[2];
  const float* const k = (const float*)tensors[3];
  const float* const v = (const float*)tensors[4];
  const float* const out = (const float*)tensors[5];
  const float* const sums = (const float*)tensors[6];
  float* const dq = (float*)tensors[7];
  float* const dk = (float*)tensors[8];
  float* const dv = (float*)tensors[9];
  float* const packed = (float*)tensors[10];
  const i64 others = s.heads / s.shared, keys = up(s.S, PANEL) * s.D, values = up(s.S, PANEL) * s.E, rights = up(s.D, PANEL) * s.S;
  const i64 step = row_of_scores(s), count = rows_at_once(s);
  const float scale = (float)s.scale;
#pragma omp parallel
  {
    alignas(64) float shares[SCORES + LANES_OF_TILE], slopes[SCORES + LANES_OF_TILE];
    alignas(64) float side[ROWS * up(WIDEST, PANEL)], own[HEIGHT * ROWS];
#pragma omp for schedule(static)
    for (i64 task = 0; task < s.batch * others; ++task) {
      const i64 z = task / others, other = task % others;
      float* const key_columns = packed + task * (keys + values + rights);
      float* const value_columns = key_columns + keys;
      float* const key_rows = value_columns + values;
      lay_all(at(k, s.k, z, other, 0), s.k.row, 1, s.S, s.D, key_columns);
      lay_all(at(v, s.v, z, other, 0), s.v.row, 1, s.S, s.E, value_columns);
      lay_all(at(k, s.k, z, other, 0), 1, s.k.row, s.D, s.S, key_rows);
      float* const dks = at(dk, s.dk, z, other, 0);
      float* const dvs = at(dv, s.dv, z, other, 0);
      for (i64 x = 0; x < s.S; ++x) {
        __builtin_memset(dks + x * s.dk.row, 0, 4 * s.D);
        __builtin_memset(dvs + x * s.dv.row, 0, 4 * s.E);
      }
      for (i64 head = other * s.shared; head < (other + 1) * s.shared; ++head)
        for (i64 first = 0; first < s.L; first += count) {
          const i64 rows = least(count, s.L - first), end = seen_by(s, first + rows);
          const float* const queries = at(q, s.q, z, head, first);
          const float* const made = at(dout, s.dout, z, head, first);
          multiply(rows, up(end, PANEL), s.D, queries, s.q.row, false, key_columns, s.D, false, shares, step, nullptr);
          multiply(rows, up(end, PANEL), s.E, made, s.dout.row, false, value_columns, s.E, false, slopes, step, nullptr);
          for (i64 r = 0; r < rows; ++r) {
            const float* const y = at(out, s.out, z, head, first + r);
            const float* const dy = made + r * s.dout.row;
            float* const p = shares + r * step;
            float* const slope = slopes + r * step;
            float delta = 0;
#pragma omp simd reduction(+ : delta)
            for (i64 e = 0; e < s.E; ++e) delta += y[e] * dy[e];
            powers(p, seen_by(s, first + r + 1), end, scale, *at(sums, s.sums, z, head, first + r));
#pragma omp simd
            for (i64 x = 0; x < end; ++x) slope[x] = p[x] * (slope[x] - delta) * scale;
          }
          multiply(rows, s.D, end, slopes, step, false, key_rows, s.S, false, at(dq, s.dq, z, head, first), s.dq.row, nullptr);
          lay_all(made, 1, s.dout.row, s.E, rows, side);
          multiply(end, s.E, rows, shares, step, true, side, rows, true, dvs, s.dv.row, own);
          lay_all(queries, 1, s.q.row, s.D, rows, side);
          multiply(end, s.D, rows, slopes, step, true, side, rows, true, dks, s.dk.row, own);
        }
    }
  }
}
