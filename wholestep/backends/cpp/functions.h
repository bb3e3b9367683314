// What generated kernels are made of: numbers in memory, functions of one number, reductions, random numbers.
// Functions are without branches and calls where a compiler is to make vectors of them; IEEE rules hold throughout.
// No header is included: reading those takes longer than compiling a kernel.

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "sizes of integers");

#define INLINE static inline __attribute__((always_inline))
// of a function in which a product and the sum it is added to are one instruction, which they are nowhere else; FUSE is
// its first line
#if defined(__clang__)
#define FUSED
#define FUSE _Pragma("clang fp contract(fast)")
#else
#define FUSED __attribute__((optimize("fp-contract=fast")))
#define FUSE
#endif
#define NAN_F __builtin_nanf("")
#define INF_F __builtin_inff()

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fma_(float a, float b, float c) { return a * b + c; }
#endif

INLINE u32 bits_of(float x) { u32 y; __builtin_memcpy(&y, &x, 4); return y; }
INLINE float float_of(u32 x) { float y; __builtin_memcpy(&y, &x, 4); return y; }

INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

// ---- numbers in memory ----------------------------------------------------------------------------------------------

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct b8 { u8 bits; };

INLINE float bf16_value(u32 bits) { return float_of(bits << 16); }
INLINE float f16_value(u32 h) {
  u32 m = h & 0x7fff;
  u32 finite = bits_of(float_of(m << 13) * 0x1p112f), other = m << 13 | 0x7f800000;
  return float_of((m >= 0x7c00 ? other : finite) | (h & 0x8000) << 16);
}
INLINE u32 bf16_bits(float x) {  // to the nearest, ties to even
  u32 b = bits_of(x), r = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return x != x ? 0x7fc0 : r;
}
INLINE u32 f16_bits(float x) {
  u32 b = bits_of(x), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  u32 small = bits_of(float_of(a) + 0.5f) - 0x3f000000;  // below 2^-14: a unit of 0.5f is the smallest number of f16
  u32 r = (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13;
  r = a < 0x38800000 ? small : r;
  r = a >= 0x477ff000 ? 0x7c00 : r;
  r = a > 0x7f800000 ? 0x7e00 : r;
  return sign | r;
}

template <class T> INLINE T get(const T* p, i64 i) { return p[i]; }
INLINE float get(const bf16* p, i64 i) { return bf16_value(p[i].bits); }
INLINE float get(const f16* p, i64 i) { return f16_value(p[i].bits); }
INLINE bool get(const b8* p, i64 i) { return p[i].bits != 0; }

template <class T> INLINE void put(T* p, i64 i, T x) { p[i] = x; }
INLINE void put(bf16* p, i64 i, float x) { p[i].bits = (u16)bf16_bits(x); }
INLINE void put(f16* p, i64 i, float x) { p[i].bits = (u16)f16_bits(x); }
INLINE void put(b8* p, i64 i, bool x) { p[i].bits = x; }

// ---- conversions ----------------------------------------------------------------------------------------------------

template <class T> struct To {
  template <class S> INLINE T from(S x) { return (T)x; }
  INLINE T from(bool x) { return x ? (T)1 : (T)0; }
};
template <> struct To<bool> { template <class S> INLINE bool from(S x) { return x != (S)0; } };
template <> struct To<u8> {  // a negative float wraps around instead of being undefined
  template <class S> INLINE u8 from(S x) { return (u8)x; }
  INLINE u8 from(float x) { return (u8)(i32)x; }
  INLINE u8 from(double x) { return (u8)(i64)x; }
};
template <> struct To<i8> {
  template <class S> INLINE i8 from(S x) { return (i8)x; }
  INLINE i8 from(float x) { return (i8)(i32)x; }
  INLINE i8 from(double x) { return (i8)(i32)x; }
};
template <> struct To<i16> {
  template <class S> INLINE i16 from(S x) { return (i16)x; }
  INLINE i16 from(float x) { return (i16)(i32)x; }
  INLINE i16 from(double x) { return (i16)(i32)x; }
};

INLINE float rounded_bf16_(float x) { return bf16_value(bf16_bits(x)); }
INLINE float rounded_f16_(float x) { return f16_value(f16_bits(x)); }

// ---- functions of f32 -----------------------------------------------------------------------------------------------
// Polynomials are Chebyshev fits to functions in the comment beside them. A NaN runs through all of them.

INLINE float power_of_two(i32 n) { return float_of((u32)(n + 127) << 23); }

// of degree 8, in pairs: half as long a chain of dependent steps; s = x^2
INLINE float polynomial(float x, float s, float a8, float a7, float a6, float a5, float a4, float a3, float a2, float a1,
                        float a0) {
  float p = fma_(a7, x, a6), q = fma_(a5, x, a4), t = fma_(a3, x, a2), u = fma_(a1, x, a0);
  float s2 = s * s;
  return fma_(fma_(fma_(a8, s, p), s, q), s2, fma_(t, s, u));
}

// exp(r) - 1 for |r| <= log(2) / 2; (exp(r) - 1 - r) / r^2
INLINE float expm1_near_zero(float r) {
  float s = r * r;
  float p = fma_(1.989198131e-4f, r, 1.393454193e-3f);
  float q = fma_(8.333310024e-3f, r, 4.166645681e-2f);
  float t = fma_(1.666666668e-1f, r, 5.000000014e-1f);
  return fma_(fma_(fma_(p, s, q), s, t), s, r);
}

// the nearest whole number to a number below 2^22, as a float and as an integer
INLINE float nearest(float x, i32& n) {
  float shifted = x + 12582912.0f;
  n = (i32)(bits_of(shifted) - 0x4b400000u);
  return shifted - 12582912.0f;
}

INLINE float times_power_of_two(float x, i32 n) {  // in two steps: the last one rounds what is denormal
  i32 half = n >> 1;
  return x * power_of_two(half) * power_of_two(n - half);
}

INLINE float exp_(float x) {
  float c = x > 89.0f ? 89.0f : x;
  c = c < -104.0f ? -104.0f : c;
  i32 n;
  float k = nearest(c * 1.44269504f, n);
  float r = fma_(k, -1.42860677e-6f, fma_(k, -0.693145752f, c));
  return times_power_of_two(expm1_near_zero(r) + 1.0f, n);
}
INLINE float exp2_(float x) {
  float c = x > 129.0f ? 129.0f : x;
  c = c < -151.0f ? -151.0f : c;
  i32 n;
  float k = nearest(c, n);
  return times_power_of_two(expm1_near_zero((c - k) * 0.693147181f) + 1.0f, n);
}
INLINE float expm1_(float x) {
  float c = x > 44.0f ? 44.0f : x;
  c = c < -44.0f ? -44.0f : c;
  i32 n;
  float k = nearest(c * 1.44269504f, n);
  float r = fma_(k, -1.42860677e-6f, fma_(k, -0.693145752f, c));
  float t = power_of_two(n);
  float y = fma_(t, expm1_near_zero(r), t - 1.0f);
  y = x > 44.0f ? exp_(x) : y;
  return x == 0.0f ? x : y;
}

// x = 2^e * (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); log(1 + f) in two parts: f, and the rest of it
//   (log(1 + f) - f + f^2 / 2) / f^3
struct Logarithm { float e, f, rest; };
INLINE Logarithm logarithm(float x) {
  bool tiny = x < 0x1p-126f;
  u32 b = bits_of(tiny ? x * 0x1p25f : x) - 0x3f3504f3u;
  float f = float_of((b & 0x7fffff) + 0x3f3504f3u) - 1.0f;
  float e = (float)((i32)b >> 23) - (tiny ? 25.0f : 0.0f);
  float s = f * f;
  float p = polynomial(f, s, 6.971611471e-2f, -1.147973385e-1f, 1.168541992e-1f, -1.242568733e-1f, 1.424905765e-1f,
                       -1.666780232e-1f, 2.000071575e-1f, -2.499999696e-1f, 3.333333118e-1f);
  return {e, f, s * fma_(p, f, -0.5f)};
}
INLINE float log_outside(float x, float y) {  // where the argument is not a positive finite number
  y = x == INF_F ? x : y;
  y = x == 0.0f ? -INF_F : y;
  return x != x || x < 0.0f ? NAN_F : y;
}
INLINE float log_(float x) {
  Logarithm l = logarithm(x);
  return log_outside(x, fma_(l.e, 0.693145752f, l.f + fma_(l.e, 1.42860677e-6f, l.rest)));
}
INLINE float log2_(float x) {
  Logarithm l = logarithm(x);
  float low = fma_(l.rest, 1.44269504f, l.f * 1.92596303e-8f);
  return log_outside(x, l.e + fma_(l.f, 1.44269502f, low));
}
INLINE float log1p_(float x) {
  float u = 1.0f + x, d = u - 1.0f;
  float y = d == 0.0f ? x : log_(u) * (x / d);
  return x == INF_F ? x : y;
}

INLINE float tanh_(float x) {
  float a = 2.0f * __builtin_fabsf(x), c = a > 20.0f ? 20.0f : a;
  i32 n;
  float k = nearest(c * 1.44269504f, n);
  float p = power_of_two(n);
  float t = fma_(p, expm1_near_zero(fma_(k, -1.42860677e-6f, fma_(k, -0.693145752f, c))), p - 1.0f);
  return __builtin_copysignf(t / (t + 2.0f), x);
}
INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

INLINE float erf_(float x) {
  float t = __builtin_fabsf(x), s = x * x, s2 = s * s;
  float p = fma_(fma_(7.875875063e-5f, s, -8.016864287e-4f), s, 5.189087423e-3f);  // erf(x) / x - 1, in x^2
  float q = fma_(fma_(-2.685421201e-2f, s, 1.128359472e-1f), s2, fma_(-3.761262667e-1f, s, 1.283791658e-1f));
  float near = fma_(fma_(p, s2 * s2, q), x, x);
  float c = t > 4.1f ? 4.1f : t;
  float l = polynomial(c, c * c, 1.594001235e-6f, -4.522831461e-5f, 5.900143628e-4f, -4.728751551e-3f, 2.633626568e-2f,
                       -1.099354459e-1f, -6.319749594e-1f, -1.13014882e+0f, 2.998213212e-4f);  // log(erfc(t)), t >= 0.99
  i32 n;
  float k = nearest(l * 1.44269504f, n);
  float r = fma_(k, -1.42860677e-6f, fma_(k, -0.693145752f, l));
  float far = 1.0f - (expm1_near_zero(r) + 1.0f) * power_of_two(n);
  return t < 1.0f ? near : __builtin_copysignf(far, x);
}

INLINE float sqrt_(float x) { return __builtin_sqrtf(x); }
INLINE float sin_(float x) { return __builtin_sinf(x); }
INLINE float cos_(float x) { return __builtin_cosf(x); }
INLINE float atan2_(float x, float y) { return __builtin_atan2f(x, y); }
INLINE float pow_(float x, float y) { return __builtin_powf(x, y); }
INLINE float fmod_(float x, float y) { return __builtin_fmodf(x, y); }
INLINE float floor_(float x) { return __builtin_floorf(x); }
INLINE float ceil_(float x) { return __builtin_ceilf(x); }
INLINE float trunc_(float x) { return __builtin_truncf(x); }
INLINE float round_(float x) { return __builtin_nearbyintf(x); }
INLINE float copysign_(float x, float y) { return __builtin_copysignf(x, y); }

// ---- functions of f64: those of the C library -----------------------------------------------------------------------

INLINE double exp_(double x) { return __builtin_exp(x); }
INLINE double exp2_(double x) { return __builtin_exp2(x); }
INLINE double expm1_(double x) { return __builtin_expm1(x); }
INLINE double log_(double x) { return __builtin_log(x); }
INLINE double log2_(double x) { return __builtin_log2(x); }
INLINE double log1p_(double x) { return __builtin_log1p(x); }
INLINE double tanh_(double x) { return __builtin_tanh(x); }
INLINE double sigmoid_(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
INLINE double erf_(double x) { return __builtin_erf(x); }
INLINE double sqrt_(double x) { return __builtin_sqrt(x); }
INLINE double sin_(double x) { return __builtin_sin(x); }
INLINE double cos_(double x) { return __builtin_cos(x); }
INLINE double atan2_(double x, double y) { return __builtin_atan2(x, y); }
INLINE double pow_(double x, double y) { return __builtin_pow(x, y); }
INLINE double fmod_(double x, double y) { return __builtin_fmod(x, y); }
INLINE double floor_(double x) { return __builtin_floor(x); }
INLINE double ceil_(double x) { return __builtin_ceil(x); }
INLINE double trunc_(double x) { return __builtin_trunc(x); }
INLINE double round_(double x) { return __builtin_nearbyint(x); }
INLINE double copysign_(double x, double y) { return __builtin_copysign(x, y); }

// ---- functions of any number ----------------------------------------------------------------------------------------

// one of two by a condition that a loop does not change: by bits, since a compiler would make branches of it
template <class T> INLINE T either(bool which, T a, T b) { return (T)(b ^ ((a ^ b) & (T)-(T)which)); }
INLINE bool either(bool which, bool a, bool b) { return (which & a) | (!which & b); }
INLINE float either(bool which, float a, float b) { return float_of(either<u32>(which, bits_of(a), bits_of(b))); }
INLINE double either(bool which, double a, double b) {
  u64 x, y;
  __builtin_memcpy(&x, &a, 8);
  __builtin_memcpy(&y, &b, 8);
  x = either<u64>(which, x, y);
  __builtin_memcpy(&a, &x, 8);
  return a;
}
template <class T> INLINE T larger(T a, T b) { return a > b || a != a ? a : b; }
template <class T> INLINE T smaller(T a, T b) { return a < b || a != a ? a : b; }
template <class T> INLINE T abs_(T x) { return x < 0 ? -x : x; }
INLINE float abs_(float x) { return __builtin_fabsf(x); }
INLINE double abs_(double x) { return __builtin_fabs(x); }
INLINE u8 abs_(u8 x) { return x; }
template <class T> INLINE T sign_(T x) { return (T)((T)(x > 0) - (T)(x < 0)); }
template <class T> INLINE T relu_(T x) { return either(x < 0, (T)0, x); }

// division of integers: by 0 it gives 0, where torch raises or the processor would stop
template <class T> INLINE T trunc_div(T a, T b) { return b == 0 ? 0 : b == (T)-1 && (T)-1 < 0 ? (T)-a : (T)(a / b); }
template <class T> INLINE T fmod_any(T a, T b) { return b == 0 || (b == (T)-1 && (T)-1 < 0) ? 0 : (T)(a % b); }
template <class T> INLINE T rem_any(T a, T b) {
  T r = fmod_any(a, b);
  return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}
template <class T> INLINE T floor_div(T a, T b) {
  T q = trunc_div(a, b), r = fmod_any(a, b);
  return r != 0 && (r < 0) != (b < 0) ? (T)(q - 1) : q;
}
template <class T> INLINE T float_rem(T a, T b) {
  T r = fmod_(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class T> INLINE T float_floor_div(T a, T b) {
  T r = fmod_(a, b), q = (a - r) / b;
  q = r != 0 && (r < 0) != (b < 0) ? q - 1 : q;
  T f = floor_(q);
  f = q - f > (T)0.5 ? f + 1 : f;
  f = q != 0 ? f : copysign_((T)0, a / b);
  return b == 0 ? a / b : f;
}
INLINE float fmod_any(float a, float b) { return fmod_(a, b); }
INLINE double fmod_any(double a, double b) { return fmod_(a, b); }
INLINE float rem_any(float a, float b) { return float_rem(a, b); }
INLINE double rem_any(double a, double b) { return float_rem(a, b); }
INLINE float floor_div(float a, float b) { return float_floor_div(a, b); }
INLINE double floor_div(double a, double b) { return float_floor_div(a, b); }
INLINE float trunc_div(float a, float b) { return trunc_(a / b); }
INLINE double trunc_div(double a, double b) { return trunc_(a / b); }
template <class T> INLINE T int_pow(T x, T n) {
  if (n < 0) return x == 1 ? 1 : x == (T)-1 ? (n % 2 ? (T)-1 : 1) : 0;
  T y = 1;
  for (; n; n = (T)(n >> 1), x = (T)(x * x)) y = n & 1 ? (T)(y * x) : y;
  return y;
}

// ---- reductions -----------------------------------------------------------------------------------------------------

constexpr int LANES = 32;
struct Sum { template <class T> INLINE T of(T a, T b) { return (T)(a + b); } };
struct Prod { template <class T> INLINE T of(T a, T b) { return (T)(a * b); } };
struct Max { template <class T> INLINE T of(T a, T b) { return larger(a, b); } };
struct Min { template <class T> INLINE T of(T a, T b) { return smaller(a, b); } };
struct Or { INLINE bool of(bool a, bool b) { return a | b; } };
struct And { INLINE bool of(bool a, bool b) { return a & b; } };

template <class T> INLINE void begin(T* lanes, T neutral) { for (int l = 0; l < LANES; ++l) lanes[l] = neutral; }
template <class How, class T> INLINE T total(T* lanes) {  // in pairs
  for (int w = LANES / 2; w; w /= 2)
    for (int l = 0; l < w; ++l) lanes[l] = How::of(lanes[l], lanes[l + w]);
  return lanes[0];
}

// ---- random numbers: Philox4x32-10, see dialects/step/philox.py ------------------------------------------------------

struct Block { u32 a, b, c, d; };
INLINE Block philox_round(Block x, u32 k0, u32 k1, u32 round) {
  u64 p = (u64)x.a * 0xD2511F53u, q = (u64)x.c * 0xCD9E8D57u;
  k0 += round * 0x9E3779B9u;
  k1 += round * 0xBB67AE85u;
  return {(u32)(q >> 32) ^ x.b ^ k0, (u32)q, (u32)(p >> 32) ^ x.d ^ k1, (u32)p};
}
INLINE Block philox(i64 seed, i64 step, i64 micro_batch, u32 block, u32 stream) {
  Block x = {block, stream, (u32)step, (u32)(micro_batch | step >> 32 << 16)};
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  x = philox_round(x, k0, k1, 0);  // a loop here would keep the compiler from making vectors
  x = philox_round(x, k0, k1, 1);
  x = philox_round(x, k0, k1, 2);
  x = philox_round(x, k0, k1, 3);
  x = philox_round(x, k0, k1, 4);
  x = philox_round(x, k0, k1, 5);
  x = philox_round(x, k0, k1, 6);
  x = philox_round(x, k0, k1, 7);
  x = philox_round(x, k0, k1, 8);
  return philox_round(x, k0, k1, 9);
}
INLINE float fraction(u32 word, int digits) { return (float)(i32)(word >> (32 - digits)) * (1.0f / (float)(1u << digits)); }
INLINE float uniform(i64 seed, i64 step, i64 micro_batch, u32 block, u32 word, u32 stream, int digits) {
  Block x = philox(seed, step, micro_batch, block, stream);
  u32 low = word & 1 ? x.b : x.a, high = word & 1 ? x.d : x.c;
  return fraction(word & 2 ? high : low, digits);
}

// the numbers of up to DRAWN elements one after the other, in memory for 8 more
constexpr int DRAWN = 256;
INLINE const float* draw(float* out, i64 seed, i64 step, i64 micro_batch, i64 element, i64 count, u32 stream, int digits) {
  i64 first = element >> 2, blocks = ((element + count + 3) >> 2) - first;
#pragma omp simd
  for (i64 j = 0; j < blocks; ++j) {
    Block x = philox(seed, step, micro_batch, (u32)first + (u32)j, stream);
    out[4 * j] = fraction(x.a, digits);
    out[4 * j + 1] = fraction(x.b, digits);
    out[4 * j + 2] = fraction(x.c, digits);
    out[4 * j + 3] = fraction(x.d, digits);
  }
  return out + (element & 3);
}
