// Rows of numbers, added to a table of zeros where indices say. Each thread owns a part of the table, which it clears
// and adds to in the order of the rows: sums do not depend on the number of threads, and no number is passed on.

extern "C" int omp_get_num_threads(void);
extern "C" int omp_get_thread_num(void);

struct Walk { i64 group, apart, near; };
struct Index { Walk walk; i64 size; };
// `across`: a row is a column of the table in memory
struct Sizes { i64 tokens, rows, columns, padding, column, across, from_end, wide, count; Walk dy; Index indices[8]; };

INLINE i64 place(const Walk& w, i64 token) { return token / w.group * w.apart + token % w.group * w.near; }

extern "C" int kernel_name(void** tensors) {
  const Sizes& s = *(const Sizes*)tensors[0];
  const float* const dy = (const float*)tensors[1];
  float* const out = (float*)tensors[2];
  i64* const named = (i64*)tensors[3];  // the row of each token
  int outside = 0;
#pragma omp parallel for schedule(static) reduction(| : outside) if (s.tokens >= 16384)
  for (i64 token = 0; token < s.tokens; ++token) {
    i64 row = 0;
    for (i64 k = 0; k < s.count; ++k) {
      const Index& index = s.indices[k];
      const i64 at = place(index.walk, token);
      i64 i = s.wide ? ((const i64*)tensors[4 + k])[at] : ((const i32*)tensors[4 + k])[at];
      if (s.from_end && i < 0) i += index.size;
      if (i < 0 || i >= index.size) outside = 1;
      row = row * index.size + i;
    }
    named[token] = row;
  }
  if (outside) return 1;
  const i64 work = (s.rows + s.tokens) * s.columns, parts = s.across ? s.columns : s.rows;
#pragma omp parallel if (work >= 16384)
  {
    const i64 threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const i64 first = parts * thread / threads, end = parts * (thread + 1) / threads;
    const i64 length = s.across ? s.rows : s.columns;
    __builtin_memset(out + first * length, 0, (end - first) * length * 4);
    if (s.across) {
      for (i64 c = first; c < end; ++c)
        for (i64 token = 0; token < s.tokens; ++token)
          if (named[token] != s.padding) out[c * s.rows + named[token]] += dy[c * s.column + place(s.dy, token)];
    } else {
      for (i64 token = 0; token < s.tokens; ++token) {
        const i64 row = named[token];
        if (row < first || row >= end || row == s.padding) continue;
        float* const to = out + row * s.columns;
        const float* const from = dy + place(s.dy, token);
        if (s.column == 1) {
#pragma omp simd
          for (i64 c = 0; c < s.columns; ++c) to[c] += from[c];
        } else {
          for (i64 c = 0; c < s.columns; ++c) to[c] += from[c * s.column];
        }
      }
    }
  }
  return 0;
}
