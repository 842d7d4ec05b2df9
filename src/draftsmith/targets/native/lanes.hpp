// Sixteen lanes of float or int32, on AVX-512, AVX2 or plain C++.
//
// Every kernel is written once over these lanes. All three ways do the same operations in the same
// order, with a fused multiply-add, so that they give the same bits (bfloat16 in tiles: matrix.hpp).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

// Numbers that begin where a cache line does, so that sixteen floats lie in one.
template <class T>
struct OnLines {
  using value_type = T;
  static constexpr std::align_val_t LINE{64};
  OnLines() = default;
  template <class U>
  OnLines(const OnLines<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), LINE); }
  void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
  friend bool operator==(const OnLines&, const OnLines&) { return true; }
  friend bool operator!=(const OnLines&, const OnLines&) { return false; }
};
template <class T>
using Lines = std::vector<T, OnLines<T>>;

// A thread reads its panels, and its keys, from first to last. What it will read is asked for early,
// because a processor looks ahead over fewer lines the more is computed with each. Behind the end
// nothing is read: an address that is none is ignored.
constexpr int AHEAD = 4096;  // bytes
static inline void fetch_ahead(const void* w) { __builtin_prefetch((const uint8_t*)w + AHEAD); }

template <int N>
struct Number {
  static constexpr int value = N;
};
// `use(Number<n>())`, for n of 1 .. MOST.
template <int MOST, class Use>
static inline void with_number(int n, Use use) {
  if constexpr (MOST > 1)
    if (n < MOST) return with_number<MOST - 1>(n, use);
  use(Number<MOST>());
}

#if defined(__AVX2__)
static inline float sum_of_eight(__m256 s) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float largest_of_eight(__m256 s) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define DS_ISA "avx512-vnni"
#define DS_VNNI 1

struct F { __m512 v; };
struct I { __m512i v; };
// Read once: a compiler may read operands again for each use, and wait for what it keeps in memory.
static inline void in_registers(F& a) { asm("" : "+v"(a.v)); }
static inline F zero() { return {_mm512_setzero_ps()}; }
static inline F all(float x) { return {_mm512_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F nearest(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
static inline F pow2(F n) {  // 2 to a whole number in -126..127
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
static inline F from_bf16(const uint16_t* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
static inline F from_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void to_int8(int8_t* out, F a) {  // whole numbers in -127..127
  _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
static inline __m256 high_eight(F a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }
static inline float sum(F a) { return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(a.v), high_eight(a))); }
static inline float largest(F a) { return largest_of_eight(_mm256_max_ps(_mm512_castps512_ps256(a.v), high_eight(a))); }
static inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
static inline I read_bits(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline F low_half(I a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
static inline F high_half(I a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32((int)0xFFFF0000)))};
}
static inline __attribute__((always_inline)) void transpose(I* m) {
  I t[LANES];
  for (int r = 0; r < LANES; r += 4) {
    for (int i = 0; i < 4; i += 2) {
      t[r + i].v = _mm512_unpacklo_epi32(m[r + i].v, m[r + i + 1].v);
      t[r + i + 1].v = _mm512_unpackhi_epi32(m[r + i].v, m[r + i + 1].v);
    }
    for (int i = 0; i < 2; ++i) {  // fours of rows: lane 4 c + k of m[r + i] is column 4 c + i
      m[r + 2 * i].v = _mm512_unpacklo_epi64(t[r + i].v, t[r + i + 2].v);
      m[r + 2 * i + 1].v = _mm512_unpackhi_epi64(t[r + i].v, t[r + i + 2].v);
    }
  }
  for (int r = 0; r < LANES; r += 8)
    for (int i = 0; i < 4; ++i) {
      t[r + i].v = _mm512_shuffle_i32x4(m[r + i].v, m[r + i + 4].v, 0x88);
      t[r + i + 4].v = _mm512_shuffle_i32x4(m[r + i].v, m[r + i + 4].v, 0xDD);
    }
  for (int i = 0; i < 8; ++i) {
    m[i].v = _mm512_shuffle_i32x4(t[i].v, t[i + 8].v, 0x88);
    m[i + 8].v = _mm512_shuffle_i32x4(t[i].v, t[i + 8].v, 0xDD);
  }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DS_ISA "avx2"
#define DS_AVX2
#define DS_VNNI 0

struct F { __m256 lo, hi; };
struct I { __m256i lo, hi; };
static inline void in_registers(F& a) { asm("" : "+x"(a.lo), "+x"(a.hi)); }
static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline F fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F operator*(F a, F b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline F operator+(F a, F b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline F operator-(F a, F b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline F operator/(F a, F b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static inline F max(F a, F b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static inline F min(F a, F b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
static inline F abs(F a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline F nearest(F a) { return {_mm256_round_ps(a.lo, 0), _mm256_round_ps(a.hi, 0)}; }
static inline __m256 pow2_(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
static inline F pow2(F n) { return {pow2_(n.lo), pow2_(n.hi)}; }
static inline __m256 bf16_(const uint16_t* p) {
  __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
static inline F from_bf16(const uint16_t* p) { return {bf16_(p), bf16_(p + 8)}; }
static inline F from_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline void to_int8(int8_t* out, F a) {
  __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  w = _mm256_permute4x64_epi64(w, 0xD8);
  __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128((__m128i*)out, b);
}
static inline float sum(F a) { return sum_of_eight(_mm256_add_ps(a.lo, a.hi)); }
static inline float largest(F a) { return largest_of_eight(_mm256_max_ps(a.lo, a.hi)); }
static inline F as_float(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
static inline I read_bits(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
static inline F low_half(I a) { return as_float({_mm256_slli_epi32(a.lo, 16), _mm256_slli_epi32(a.hi, 16)}); }
static inline F high_half(I a) {
  const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000);
  return as_float({_mm256_and_si256(a.lo, upper), _mm256_and_si256(a.hi, upper)});
}
// Eight rows, of which some half is: `half(row)`.
template <class Half>
static inline void transpose_eight(Half half) {
  __m256i t[8], u[8];
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
    for (int i = 0; i < 4; i += 2) {
      t[r + i] = _mm256_unpacklo_epi32(half(r + i), half(r + i + 1));
      t[r + i + 1] = _mm256_unpackhi_epi32(half(r + i), half(r + i + 1));
    }
    for (int i = 0; i < 2; ++i) {
      u[r + 2 * i] = _mm256_unpacklo_epi64(t[r + i], t[r + i + 2]);
      u[r + 2 * i + 1] = _mm256_unpackhi_epi64(t[r + i], t[r + i + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    half(i) = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    half(i + 4) = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}
static inline __attribute__((always_inline)) void transpose(I* m) {
  transpose_eight([&](int r) -> __m256i& { return m[r].lo; });
  transpose_eight([&](int r) -> __m256i& { return m[r].hi; });
  transpose_eight([&](int r) -> __m256i& { return m[r + 8].lo; });
  transpose_eight([&](int r) -> __m256i& { return m[r + 8].hi; });
  for (int r = 0; r < 8; ++r) std::swap(m[r].hi, m[r + 8].lo);
}

#else
#define DS_ISA "plain"
#define DS_VNNI 0

struct F { float v[LANES]; };
struct I { int32_t v[LANES]; };
#define DS_LANES for (int i = 0; i < LANES; ++i)
static inline void in_registers(F&) {}
static inline F zero() { return {}; }
static inline F all(float x) { F r; DS_LANES r.v[i] = x; return r; }
static inline F load(const float* p) { F r; DS_LANES r.v[i] = p[i]; return r; }
static inline void store(float* p, F a) { DS_LANES p[i] = a.v[i]; }
static inline F fma(F a, F b, F c) { DS_LANES a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return a; }
static inline F operator*(F a, F b) { DS_LANES a.v[i] *= b.v[i]; return a; }
static inline F operator+(F a, F b) { DS_LANES a.v[i] += b.v[i]; return a; }
static inline F operator-(F a, F b) { DS_LANES a.v[i] -= b.v[i]; return a; }
static inline F operator/(F a, F b) { DS_LANES a.v[i] /= b.v[i]; return a; }
static inline F max(F a, F b) { DS_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F min(F a, F b) { DS_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline F abs(F a) { DS_LANES a.v[i] = std::fabs(a.v[i]); return a; }
static inline F nearest(F a) { DS_LANES a.v[i] = std::nearbyint(a.v[i]); return a; }
static inline F pow2(F n) { DS_LANES n.v[i] = std::ldexp(1.0f, (int)n.v[i]); return n; }
static inline F from_bf16(const uint16_t* p) {
  F r;
  DS_LANES { uint32_t w = (uint32_t)p[i] << 16; std::memcpy(&r.v[i], &w, 4); }
  return r;
}
static inline F from_half(const uint16_t* p) {
  F r;
  DS_LANES {
    int sign = p[i] >> 15, e = (p[i] >> 10) & 31, m = p[i] & 1023;
    float x = e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp((float)m, -24);
    if (e == 31) x = m ? NAN : INFINITY;
    r.v[i] = sign ? -x : x;
  }
  return r;
}
static inline F to_float(I a) { F r; DS_LANES r.v[i] = (float)a.v[i]; return r; }
static inline void to_int8(int8_t* out, F a) { DS_LANES out[i] = (int8_t)std::nearbyint(a.v[i]); }
static inline float sum(F a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) a.v[i] += a.v[i + n];
  return a.v[0];
}
static inline float largest(F a) {
  for (int i = 1; i < LANES; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}
static inline F as_float(I a) { F r; std::memcpy(&r, &a, sizeof r); return r; }
static inline I read_bits(const void* p) { I r; std::memcpy(&r, p, sizeof r); return r; }
static inline F low_half(I a) { DS_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] << 16); return as_float(a); }
static inline F high_half(I a) { DS_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] & 0xFFFF0000u); return as_float(a); }
static inline __attribute__((always_inline)) void transpose(I* m) {
  for (int r = 0; r < LANES; ++r)
    for (int i = 0; i < r; ++i) std::swap(m[r].v[i], m[i].v[r]);
}
#endif

// e to the x, to about two units in the last place; below -87 it is 1e-38, not 0.
static inline F exp(F x) {
  x = min(max(x, all(-87.0f)), all(88.0f));
  F n = nearest(x * all(1.44269504088896341f));
  F r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  F p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  return p * pow2(n);
}
