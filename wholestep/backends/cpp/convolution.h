// Convolutions of images that lie channels-last: what makes a matrix product of one, and depthwise ones as they are.
// One function for all of them: the last tensor says what is to be done and with which sizes.

struct Sizes { i64 part, n, c, h, w, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw, chunks; };

typedef float Eight __attribute__((vector_size(32)));
template <class V> INLINE V at(const float* p) { V x; __builtin_memcpy(&x, p, sizeof(V)); return x; }
template <class V> INLINE void into(float* p, V x) { __builtin_memcpy(p, &x, sizeof(V)); }
// places outside of the image are zeros: the taps (or outputs) from `first` up to `end` are those inside of it
INLINE i64 first_inside(i64 start, i64 step) { return start >= 0 ? 0 : (-start + step - 1) / step; }
INLINE i64 end_inside(i64 start, i64 step, i64 size, i64 count) {
  return start >= size ? 0 : least(count, (size - start + step - 1) / step);
}

// the windows of an image as rows of a matrix: (n, oh, ow) x (kh, kw, c)
static void windows(const Sizes& s, const float* x, float* out) {
  const i64 row = s.kw * s.c;
#pragma omp parallel for schedule(static)
  for (i64 task = 0; task < s.n * s.oh; ++task) {
    const i64 n = task / s.oh, oy = task % s.oh;
    float* to = out + task * s.ow * s.kh * row;
    for (i64 ox = 0; ox < s.ow; ++ox) {
      const i64 ix = ox * s.sw - s.pw, low = least(first_inside(ix, s.dw), s.kw), high = most(end_inside(ix, s.dw, s.w, s.kw), low);
      for (i64 ky = 0; ky < s.kh; ++ky, to += row) {
        const i64 iy = oy * s.sh - s.ph + ky * s.dh;
        const bool inside = iy >= 0 && iy < s.h;
        const i64 from = inside ? low * s.c : row, end = inside ? high * s.c : row;
        const float* const line = x + ((n * s.h + iy) * s.w + ix) * s.c;
        __builtin_memset(to, 0, from * 4);
        if (s.dw == 1) __builtin_memcpy(to + from, line + from, (end - from) * 4);
        else for (i64 tap = from; tap < end; tap += s.c) __builtin_memcpy(to + tap, line + tap * s.dw, s.c * 4);
        __builtin_memset(to + end, 0, (row - end) * 4);
      }
    }
  }
}

// what the rows of such a matrix give to an image, added up
static void gathered(const Sizes& s, const float* rows, float* out) {
#pragma omp parallel for schedule(static)
  for (i64 task = 0; task < s.n * s.h; ++task) {
    const i64 n = task / s.h, y = task % s.h;
    for (i64 x = 0; x < s.w; ++x) {
      float* const to = out + (task * s.w + x) * s.c;
      __builtin_memset(to, 0, s.c * 4);
      for (i64 ky = 0; ky < s.kh; ++ky)
        for (i64 kx = 0; kx < s.kw; ++kx) {
          const i64 oy = y + s.ph - ky * s.dh, ox = x + s.pw - kx * s.dw;  // where the window of this tap begins
          if (oy < 0 || oy >= s.oh * s.sh || oy % s.sh || ox < 0 || ox >= s.ow * s.sw || ox % s.sw) continue;
          const float* const from = rows + ((((n * s.oh + oy / s.sh) * s.ow + ox / s.sw) * s.kh + ky) * s.kw + kx) * s.c;
#pragma omp simd
          for (i64 c = 0; c < s.c; ++c) to[c] += from[c];
        }
    }
  }
}

// ---- depthwise: R vectors of channels at a time ----------------------------------------------------------------------

constexpr int TAPS = 49;  // of the largest kernel

// the taps of some channels, tap by tap; backwards if flipped
template <class V, int R> INLINE void turned(const float* w, i64 taps, i64 c, float* out, bool flipped) {
  constexpr int B = R * (int)(sizeof(V) / 4);
  for (i64 t = 0; t < taps; ++t)
    for (int l = 0; l < B; ++l) out[t * B + l] = w[(c + l) * taps + (flipped ? taps - 1 - t : t)];
}

template <class V, int R>
FUSED static void forward(const Sizes& s, const float* x, const float* w, float* y, i64 c, i64 n0, i64 n1, bool flipped = false) {
  FUSE
  constexpr int L = sizeof(V) / 4, B = R * L;
  alignas(64) float taps[TAPS * B];
  turned<V, R>(w, s.kh * s.kw, c, taps, flipped);
  for (i64 n = n0; n < n1; ++n)
    for (i64 oy = 0; oy < s.oh; ++oy) {
      const i64 iy = oy * s.sh - s.ph, top = first_inside(iy, 1), bottom = end_inside(iy, 1, s.h, s.kh);
      for (i64 ox = 0; ox < s.ow; ++ox) {
        const i64 ix = ox * s.sw - s.pw, left = first_inside(ix, 1), right = end_inside(ix, 1, s.w, s.kw);
        V sum[R] = {};
        for (i64 ky = top; ky < bottom; ++ky)
          for (i64 kx = left; kx < right; ++kx) {
            const float* const p = x + ((n * s.h + iy + ky) * s.w + ix + kx) * s.c + c;
            const float* const q = taps + (ky * s.kw + kx) * B;
            for (int r = 0; r < R; ++r) sum[r] += at<V>(p + r * L) * at<V>(q + r * L);
          }
        float* const to = y + ((n * s.oh + oy) * s.ow + ox) * s.c + c;
        for (int r = 0; r < R; ++r) into<V>(to + r * L, sum[r]);
      }
    }
}

template <class V, int R>
FUSED static void backward(const Sizes& s, const float* dy, const float* w, float* dx, i64 c, i64 n0, i64 n1) {
  FUSE
  constexpr int L = sizeof(V) / 4, B = R * L;
  if (s.sh == 1 && s.sw == 1 && s.ph < s.kh && s.pw < s.kw) {  // a convolution with the kernel turned around
    const Sizes t = {s.part, s.n, s.c, s.oh, s.ow, s.h, s.w, s.kh, s.kw, 1, 1, s.kh - 1 - s.ph, s.kw - 1 - s.pw, 1, 1, s.chunks};
    forward<V, R>(t, dy, w, dx, c, n0, n1, true);
    return;
  }
  alignas(64) float taps[TAPS * B];
  turned<V, R>(w, s.kh * s.kw, c, taps, false);
  for (i64 n = n0; n < n1; ++n)
    for (i64 y = 0; y < s.h; ++y)
      for (i64 x = 0; x < s.w; ++x) {
        V sum[R] = {};
        for (i64 ky = (y + s.ph) % s.sh, oy = (y + s.ph) / s.sh; ky < s.kh; ky += s.sh, --oy) {
          if (oy < 0 || oy >= s.oh) continue;
          for (i64 kx = (x + s.pw) % s.sw, ox = (x + s.pw) / s.sw; kx < s.kw; kx += s.sw, --ox) {
            if (ox < 0 || ox >= s.ow) continue;
            const float* const p = dy + ((n * s.oh + oy) * s.ow + ox) * s.c + c;
            const float* const q = taps + (ky * s.kw + kx) * B;
            for (int r = 0; r < R; ++r) sum[r] += at<V>(p + r * L) * at<V>(q + r * L);
          }
        }
        float* const to = dx + ((n * s.h + y) * s.w + x) * s.c + c;
        for (int r = 0; r < R; ++r) into<V>(to + r * L, sum[r]);
      }
}

// sums over some images: out is [taps, c]
template <class V, int R>
FUSED static void kernel_sums(const Sizes& s, const float* x, const float* dy, float* out, i64 c, i64 n0, i64 n1) {
  FUSE
  constexpr int L = sizeof(V) / 4, B = R * L;
  const i64 taps = s.kh * s.kw;
  alignas(64) float sums[TAPS * B];
  for (i64 k = 0; k < taps * B; ++k) sums[k] = 0;
  for (i64 n = n0; n < n1; ++n)
    for (i64 oy = 0; oy < s.oh; ++oy)
      for (i64 ky = 0; ky < s.kh; ++ky) {
        const i64 iy = oy * s.sh - s.ph + ky;
        if (iy < 0 || iy >= s.h) continue;
        const float* const p = x + (n * s.h + iy) * s.w * s.c + c;
        const float* const q = dy + (n * s.oh + oy) * s.ow * s.c + c;
        for (i64 kx = 0; kx < s.kw; ++kx) {
          float* const to = sums + (ky * s.kw + kx) * B;
          V sum[R];
          for (int r = 0; r < R; ++r) sum[r] = at<V>(to + r * L);
          const i64 start = kx - s.pw, end = end_inside(start, s.sw, s.w, s.ow);
          for (i64 ox = first_inside(start, s.sw); ox < end; ++ox)
            for (int r = 0; r < R; ++r)
              sum[r] += at<V>(p + (ox * s.sw + start) * s.c + r * L) * at<V>(q + ox * s.c + r * L);
          for (int r = 0; r < R; ++r) into<V>(to + r * L, sum[r]);
        }
      }
  for (i64 t = 0; t < taps; ++t)
    for (int l = 0; l < B; ++l) out[t * s.c + c + l] = sums[t * B + l];
}

#define FOR_CHANNELS(function, ...)                                        \
  if (width == 32) function<Eight, 4>(s, a, b, __VA_ARGS__, c, n0, n1);      \
  else if (width == 16) function<Eight, 2>(s, a, b, __VA_ARGS__, c, n0, n1); \
  else if (width == 8) function<Eight, 1>(s, a, b, __VA_ARGS__, c, n0, n1);  \
  else function<float, 1>(s, a, b, __VA_ARGS__, c, n0, n1);

// blocks of 32 channels, then 16, 8, and single ones; by chunks of images
static void depthwise(const Sizes& s, const float* a, const float* b, float* out, float* partial) {
  const i64 wide = s.c / 32, blocks = wide + s.c / 16 % 2 + s.c / 8 % 2 + s.c % 8, taps = s.kh * s.kw;
  const i64 length = (s.n + s.chunks - 1) / s.chunks;
#pragma omp parallel for schedule(static)
  for (i64 task = 0; task < blocks * s.chunks; ++task) {
    const i64 chunk = task / blocks, block = task % blocks;
    const i64 left = blocks - block - s.c % 8;  // blocks of vectors from here on
    const i64 width = block < wide ? 32 : left <= 0 ? 1 : left == 2 || s.c / 8 % 2 == 0 ? 16 : 8;
    const i64 c = block < wide ? 32 * block : left <= 0 ? s.c - (blocks - block) : s.c / 8 * 8 - (left == 2 ? 24 : width);
    const i64 n0 = least(chunk * length, s.n), n1 = least(n0 + length, s.n);
    if (s.part == 2) { FOR_CHANNELS(forward, out) }
    else if (s.part == 3) { FOR_CHANNELS(backward, out) }
    else { FOR_CHANNELS(kernel_sums, partial + chunk * taps * s.c) }
  }
  if (s.part == 4)
    for (i64 c = 0; c < s.c; ++c)
      for (i64 t = 0; t < taps; ++t) {
        float sum = 0;
        for (i64 chunk = 0; chunk < s.chunks; ++chunk) sum += partial[(chunk * taps + t) * s.c + c];
        out[c * taps + t] = sum;
      }
}

extern "C" int kernel_name(void** tensors) {
  const i64 part = *(const i64*)tensors[0];
  const Sizes& s = *(const Sizes*)tensors[0];
  const float* const a = (const float*)tensors[1];
  if (part == 0) windows(s, a, (float*)tensors[2]);
  else if (part == 1) gathered(s, a, (float*)tensors[2]);
  else depthwise(s, a, (const float*)tensors[2], (float*)tensors[3], part == 4 ? (float*)tensors[4] : nullptr);
  return 0;
}
