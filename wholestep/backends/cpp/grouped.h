// A product per group of rows. Rows by the matrix of their group: result[m, n] = sum of left[m, k] * right[g, k, n]; or
// sums over the rows of each group: result[g, k, n] = sum of left[m, k] * right[m, n]. Where groups end is read here.

struct Grouped { i64 what, sums, wide, groups, rows, n, k, am, ak, bg, bk, bn, cg, cm; };

// what belongs to no group, or sums of none
static void clear(float* out, i64 rows, i64 columns, i64 step) {
#pragma omp parallel for schedule(static)
  for (i64 r = 0; r < rows; ++r)
    for (i64 c = 0; c < columns; ++c) out[r * step + c] = 0;
}

static void grouped(void** tensors) {
  const Grouped& s = *(const Grouped*)tensors[0];
  const float* const left = (const float*)tensors[1];
  const float* const right = (const float*)tensors[2];
  float* const result = (float*)tensors[4];
  float* const panels = (float*)tensors[5];
  i64 from = 0;
  for (i64 g = 0; g < s.groups; ++g) {
    const i64 told = s.wide ? ((const i64*)tensors[3])[g] : ((const i32*)tensors[3])[g];
    const i64 end = told < from ? from : least(told, s.rows), rows = end - from;
    if (s.sums && !rows)
      clear(result + g * s.cg, s.k, s.n, s.cm);
    else if (s.sums)
      multiply({0, 1, s.k, s.n, rows, 0, s.ak, s.am, 0, s.bg, s.bn, 0, s.cm, 0}, left + from * s.am, right + from * s.bg,
               result + g * s.cg, panels, nullptr);
    else if (rows)
      multiply({0, 1, rows, s.n, s.k, 0, s.am, s.ak, 0, s.bk, s.bn, 0, s.cm, 0}, left + from * s.am, right + g * s.bg,
               result + from * s.cm, panels, nullptr);
    from = end;
  }
  if (!s.sums) clear(result + from * s.cm, s.rows - from, s.n, s.cm);
}
