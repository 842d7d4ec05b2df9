// Products of few tokens with a large matrix.
//
// A matrix [R, K] is kept in panels of 16 rows, so that a lane is a row and a product runs along k
// from first to last, whatever else is computed beside it:
//
//   panel p, float32          k = 0: rows 16p .. 16p+15 | k = 1: ...
//   panel p, bfloat16         k = 0, 1 of row 0, of row 1, ... of row 15 | k = 2, 3 of row 0, ...
//   panel p, 8 bits           k = 0..3 of row 0, of row 1, ... of row 15 | k = 4..7 of row 0, ...
//   panel p, 4 bits           the same; a byte holds k = j (low half) and k = j + 4 (high half)
//
// The sum of a (row, token) is made in one order for every number of tokens: results are equal bit
// for bit whether a token is computed alone or beside others. Of bfloat16 that order is another one
// where the processor has tiles.
#pragma once
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "lanes.hpp"

#if DS_VNNI && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define DS_TILES 1
#else
#define DS_TILES 0
#endif

// A kernel is compiled by itself: within its caller it would share registers with it.
#define NOT_INLINED __attribute__((noinline))

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

// What VNNI adds to an activation, so that it has no sign; taken off again by sums of the weights.
constexpr int OFFSET = DS_VNNI ? 128 : 0;
// Tokens that share one reading of a panel: as many as there are registers for their sums.
constexpr int WHOLE_TILE = DS_VNNI ? 11 : 4, FLOAT_TILE = DS_VNNI ? 12 : 6;
// The same where two panels are read together, of float weights: each activation is then read once
// for both, and twice as many sums hide what an addition waits.
constexpr int PAIR_TILE = DS_VNNI ? 9 : 2;

struct Matrix {
  int32_t format, rows, cols, group;  // group: columns that share a scale (int formats)
  const uint8_t* data;                // panels
  const uint8_t* scales;  // INT8: float32 [panels, groups, 16]; INT4: halves d [16], m [16] per group
  const int32_t* sums;    // INT8: of the weights of a row and group, [panels, groups, 16]
  const float* bias;      // or null

  int panels() const { return (rows + LANES - 1) / LANES; }
  int groups() const { return format == INT8 || format == INT4 ? cols / group : 0; }
  bool whole() const { return format == INT8 || format == INT4; }
  size_t panel_bytes() const {
    size_t cells = (size_t)LANES * cols;
    return format == FLOAT32 ? 4 * cells : format == BFLOAT16 ? 2 * cells
         : format == INT8 ? cells : cells / 2;
  }
};

// Activations of some tokens as a matrix wants them.
struct Input {
  const float* x;     // [tokens, cols]
  const int8_t* q;    // [tokens, cols], + OFFSET in 8 bits
  const float* scale;  // [groups, tokens]
  const float* sum;    // [groups, tokens]: scale times the sum of q (INT4)
  int cols, tokens;

  // Of the tokens behind the first ones.
  Input behind(int first) const {
    const size_t at = (size_t)first * cols;
    if (!q) return {x + at, nullptr, nullptr, nullptr, cols, tokens};
    return {x + at, q + at, scale + first, sum + first, cols, tokens};
  }
};

// ------------------------------------------------------------------------- float weights

// No lambda adds to the sums: what one captures, GCC writes to memory at every column.
template <int T, int P, bool HALF>
static NOT_INLINED void panels_float(const Matrix& m, const Input& in, int panel, int token, F* out) {
  F acc[T][P];
  const uint8_t* w[P];
  const float* x[T];
  for (int p = 0; p < P; ++p) w[p] = m.data + (panel + p) * m.panel_bytes();
  for (int t = 0; t < T; ++t) x[t] = in.x + (size_t)(token + t) * in.cols;
  for (int t = 0; t < T; ++t)
    for (int p = 0; p < P; ++p) acc[t][p] = zero();
  for (int k = 0; k < m.cols; k += HALF ? 2 : 1) {
    I bits[P];
    F row[P];
    for (int p = 0; p < P; ++p) {
      const uint8_t* at = w[p] + (size_t)k * LANES * (HALF ? 2 : 4);
      fetch_ahead(at);
      bits[p] = read_bits(at);
      row[p] = HALF ? low_half(bits[p]) : as_float(bits[p]);
      in_registers(row[p]);
    }
    for (int t = 0; t < T; ++t) {
      const F one = all(x[t][k]);
      for (int p = 0; p < P; ++p) acc[t][p] = fma(row[p], one, acc[t][p]);
    }
    if (!HALF) continue;
    for (int p = 0; p < P; ++p) {
      row[p] = high_half(bits[p]);
      in_registers(row[p]);
    }
    for (int t = 0; t < T; ++t) {
      const F one = all(x[t][k + 1]);
      for (int p = 0; p < P; ++p) acc[t][p] = fma(row[p], one, acc[t][p]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int p = 0; p < P; ++p) out[t * P + p] = acc[t][p];
}

// ------------------------------------------------------------------------- bfloat16 in tiles

#if DS_TILES
// Some processors multiply 16 tokens with 16 rows over 32 columns at a time (AMX), faster than memory
// brings the weights. Both factors are bfloat16 there, so an activation is the sum of three of them,
// which has all 24 bits of a float32:
//
//   x = a + b + c      a = bf16(x), b = bf16(x - a), c = bf16(x - a - b)
//
// 32 columns of a are added to a sum, then those of b, then of c; then the next 32. An infinite
// activation gives no number.
//
// Every number of tokens takes this way, so results are equal bit for bit, whatever stands beside a
// token; of the way by lanes they differ by roundings.
constexpr int TILE = 16, TILE_COLS = 32, PARTS = 3;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  explicit TileShapes(int tokens) {  // sums 0..3, activations 4..6, weights 7
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = i == 7 ? TILE : tokens;
  }
};

// Memory of this thread, at a multiple of 64, until it asks again.
static inline void* scratch(size_t bytes) {
  static thread_local std::vector<uint8_t> room;
  if (room.size() < bytes + 64) room.resize(bytes + 64);
  return (void*)(((uintptr_t)room.data() + 63) / 64 * 64);
}

// The parts of `tokens` rows of x: [columns / 32, parts, tokens, 32].
static inline void split(const float* x, int cols, int tokens, uint16_t* to) {
  for (int t = 0; t < tokens; ++t)
    for (int k = 0; k < cols; k += TILE_COLS) {
      __m512 low = _mm512_loadu_ps(x + (size_t)t * cols + k), high = _mm512_loadu_ps(x + (size_t)t * cols + k + 16);
      for (int part = 0; part < PARTS; ++part) {
        uint16_t* at = to + ((size_t)(k / TILE_COLS * PARTS + part) * tokens + t) * TILE_COLS;
        _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        low = _mm512_sub_ps(low, from_bf16(at).v);
        high = _mm512_sub_ps(high, from_bf16(at + 16).v);
      }
    }
}

// The sums of panels behind each other for the tokens whose parts these are: `out` [panels, tokens, 16].
// Four panels hide how long a tile waits for its last product, and memory brings four streams faster.
template <int P>
static NOT_INLINED void panels_in_tiles(const uint8_t* w, size_t panel, int cols, const uint16_t* x, int tokens,
                                        float* out) {
  const size_t part = (size_t)tokens * TILE_COLS, sums = (size_t)tokens * LANES;
  auto fetch = [](const uint8_t* at) {
    for (int line = 0; line < TILE; ++line) fetch_ahead(at + line * 64);
  };
  _tile_zero(0);
  if (P == 4) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < cols; k += TILE_COLS, w += TILE * 64, x += PARTS * part) {
    _tile_loadd(4, x, 64);
    _tile_loadd(5, x + part, 64);
    _tile_loadd(6, x + 2 * part, 64);
#define DS_ADD(sum, w)        \
  fetch(w);                   \
  _tile_loadd(7, w, 64);      \
  _tile_dpbf16ps(sum, 4, 7);  \
  _tile_dpbf16ps(sum, 5, 7);  \
  _tile_dpbf16ps(sum, 6, 7)
    DS_ADD(0, w);
    if (P == 4) {
      DS_ADD(1, w + panel);
      DS_ADD(2, w + 2 * panel);
      DS_ADD(3, w + 3 * panel);
    }
#undef DS_ADD
  }
  _tile_stored(0, out, 64);
  if (P == 4) {
    _tile_stored(1, out + sums, 64);
    _tile_stored(2, out + 2 * sums, 64);
    _tile_stored(3, out + 3 * sums, 64);
  }
}

// One token alone, as a tile computes it: sums of even and of odd columns, 32 columns at a time, which
// are added to what was there. Memory brings the weights faster to lanes than to tiles.
template <int P>
static NOT_INLINED void panels_as_in_tiles(const uint8_t* w, size_t panel, int cols, const float* const* x, F* out) {
  for (int p = 0; p < P; ++p) out[p] = zero();
  for (int first = 0; first < cols; first += TILE_COLS) {
    F even[P][PARTS], odd[P][PARTS];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < PARTS; ++i) even[p][i] = odd[p][i] = zero();
    for (int k = first; k < first + TILE_COLS; k += 2)
      for (int p = 0; p < P; ++p) {
        const uint8_t* at = w + p * panel + (size_t)k * LANES * 2;
        fetch_ahead(at);
        const I two = read_bits(at);
        F low = low_half(two), high = high_half(two);
        in_registers(low);
        in_registers(high);
        for (int i = 0; i < PARTS; ++i) {
          even[p][i] = fma(low, all(x[i][k]), even[p][i]);
          odd[p][i] = fma(high, all(x[i][k + 1]), odd[p][i]);
        }
      }
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < PARTS; ++i) out[p] = out[p] + (even[p][i] + odd[p][i]);
  }
}

// Tiles take numbers below the normal ones for 0.
struct NormalOnly {
  const unsigned before = _mm_getcsr();
  NormalOnly() { _mm_setcsr(before | 0x8040); }
  ~NormalOnly() { _mm_setcsr(before); }
};

template <class Give>
static inline void multiply_as_in_tiles(const Matrix& m, const Input& in, int from, int to, Give give) {
  float* parts = (float*)scratch(sizeof(float) * PARTS * m.cols);
  const float* x[PARTS];
  for (int i = 0; i < PARTS; ++i) x[i] = parts + (size_t)i * m.cols;
  for (int k = 0; k < m.cols; k += LANES) {
    __m512 left = _mm512_loadu_ps(in.x + k);
    for (int i = 0; i < PARTS; ++i) {
      alignas(32) uint16_t some[LANES];
      _mm256_store_si256((__m256i*)some, (__m256i)_mm512_cvtneps_pbh(left));
      const F part = from_bf16(some);
      store(parts + (size_t)i * m.cols + k, part);
      left = _mm512_sub_ps(left, part.v);
    }
  }
  F out[4];
  int panel = from;
  auto some = [&](auto together) {
    constexpr int P = decltype(together)::value;
    {
      const NormalOnly normal;  // not while results are given: others are not given so
      panels_as_in_tiles<P>(m.data + panel * m.panel_bytes(), m.panel_bytes(), m.cols, x, out);
    }
    for (int p = 0; p < P; ++p) give(panel + p, 0, out[p]);
    panel += P;
  };
  while (panel + 4 <= to) some(Number<4>());
  while (panel < to) some(Number<1>());
}

template <class Give>
static inline void multiply_in_tiles(const Matrix& m, const Input& in, int from, int to, int tokens, Give give) {
  if (from >= to) return;
  if (tokens == 1) return multiply_as_in_tiles(m, in, from, to, give);
  uint16_t* parts = (uint16_t*)scratch(sizeof(uint16_t) * PARTS * tokens * m.cols);
  auto parts_of = [&](int token) { return parts + (size_t)PARTS * token * m.cols; };
  for (int t = 0; t < tokens; t += TILE)
    split(in.x + (size_t)t * m.cols, m.cols, std::min(TILE, tokens - t), parts_of(t));
  int shaped = 0;
  alignas(64) float out[4 * TILE * LANES];
  auto some = [&](auto together, int panel) {
    constexpr int P = decltype(together)::value;
    for (int t = 0; t < tokens; t += TILE) {
      const int size = std::min(TILE, tokens - t);
      if (size != shaped) {
        const TileShapes shapes(size);
        asm volatile("" : : "r"(&shapes) : "memory");  // written whole: GCC 12 reads its front alone
        _tile_loadconfig(&shapes);
        shaped = size;
      }
      panels_in_tiles<P>(m.data + panel * m.panel_bytes(), m.panel_bytes(), m.cols, parts_of(t), size, out);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < size; ++i) give(panel + p, t + i, load(out + (p * size + i) * LANES));
    }
  };
  int panel = from;
  for (; panel + 4 <= to; panel += 4) some(Number<4>(), panel);
  for (; panel < to; ++panel) some(Number<1>(), panel);
  _tile_release();
}

// Whether tiles round as the one token does: numbers of many sizes, and of sums below the normal
// numbers, beside another token and alone.
static inline bool tiles_are_exact() {
  constexpr int COLS = 2 * TILE_COLS, PANELS = 5;
  alignas(64) uint16_t data[PANELS * LANES * COLS];
  float x[2 * COLS], beside[PANELS * LANES], alone[PANELS * LANES];
  uint32_t state = 1;
  auto drawn = [&] { return state = state * 1664525u + 1013904223u; };
  for (int least : {-30, -90}) {
    auto number = [&] {
      const float digits = (float)(drawn() >> 8) - 8388608.0f;
      return std::ldexp(digits, least + (int)(drawn() >> 28));
    };
    for (uint16_t& one : data) {
      const float value = number();
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      one = (uint16_t)(bits >> 16);
    }
    for (float& one : x) one = number();
    const Matrix m{BFLOAT16, PANELS * LANES, COLS, 0, (const uint8_t*)data, nullptr, nullptr, nullptr};
    const Input in{x, nullptr, nullptr, nullptr, COLS, 0};
    multiply_in_tiles(m, in, 0, PANELS, 2, [&](int p, int t, F v) { if (t == 0) store(beside + p * LANES, v); });
    multiply_as_in_tiles(m, in, 0, PANELS, [&](int p, int, F v) { store(alone + p * LANES, v); });
    if (std::memcmp(beside, alone, sizeof alone)) return false;
  }
  return true;
}
// The system has to be asked once for what it saves when it switches between threads.
static inline bool tiles_allowed() {
  constexpr int ASK = 0x1023, TILE_DATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0 && tiles_are_exact();
  return allowed;
}
static inline bool fits_tiles(const Matrix& m) {
  return m.format == BFLOAT16 && m.cols % TILE_COLS == 0 && tiles_allowed();
}
#else
static inline bool tiles_allowed() { return false; }
#endif

// ------------------------------------------------------------------------- integer weights

#if DS_VNNI
// Four activations in every lane, read from memory as the product takes them: a copy over another
// register would take the place of a product.
static inline __m512i four_to_all(const int8_t* x) {
  typedef int32_t __attribute__((may_alias)) Four;
  return _mm512_set1_epi32(*(const Four*)x);
}

template <int T>
static inline void dot_int8(const uint8_t* w, int steps, const int8_t* const* x, I* acc) {
  for (int t = 0; t < T; ++t) acc[t].v = _mm512_setzero_si512();
  for (int s = 0; s < steps; ++s) {
    __m512i row = _mm512_load_si512(w + (size_t)s * 64);
    fetch_ahead(w + (size_t)s * 64);
    for (int t = 0; t < T; ++t) acc[t].v = _mm512_dpbusd_epi32(acc[t].v, four_to_all(x[t] + 4 * s), row);
  }
}
template <int T>
static inline void dot_int4(const uint8_t* w, const int8_t* const* x, I* acc) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int t = 0; t < T; ++t) acc[t].v = _mm512_setzero_si512();
  for (int s = 0; s < 4; ++s) {
    __m512i both = _mm512_load_si512(w + s * 64);
    fetch_ahead(w + s * 64);
    __m512i a = _mm512_and_si512(both, low);
    __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    for (int t = 0; t < T; ++t) {
      acc[t].v = _mm512_dpbusd_epi32(acc[t].v, a, four_to_all(x[t] + 8 * s));
      acc[t].v = _mm512_dpbusd_epi32(acc[t].v, b, four_to_all(x[t] + 8 * s + 4));
    }
  }
}
#elif defined(DS_AVX2)
// Four activations in every lane, by the load itself: a copy over other registers costs more than
// the products.
static inline __m256i four_to_all(const int8_t* x) {
  typedef float __attribute__((may_alias)) Bits;
  return _mm256_castps_si256(_mm256_broadcast_ss((const float*)(const Bits*)x));
}
// Compilers would gather the sums of all steps into trees, for which there are too few registers.
static inline void in_this_order(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }

// |w| has no sign and x takes the sign of w: a pair of products is 2 * 127 * 127 at most, which
// 16 bits hold (a pair of 255 * 127 would be cut off).
template <int T>
static inline void dot_int8(const uint8_t* w, int steps, const int8_t* const* x, I* acc) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i low[T], high[T];
  for (int t = 0; t < T; ++t) low[t] = high[t] = _mm256_setzero_si256();
  for (int s = 0; s < steps; ++s, w += 64) {
    const __m256i lo = _mm256_load_si256((const __m256i*)w);
    const __m256i hi = _mm256_load_si256((const __m256i*)(w + 32));
    fetch_ahead(w);
    const __m256i abs_lo = _mm256_abs_epi8(lo), abs_hi = _mm256_abs_epi8(hi);
    for (int t = 0; t < T; ++t) {
      const __m256i four = four_to_all(x[t] + 4 * s);
      const __m256i p = _mm256_maddubs_epi16(abs_lo, _mm256_sign_epi8(four, lo));
      const __m256i q = _mm256_maddubs_epi16(abs_hi, _mm256_sign_epi8(four, hi));
      low[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(p, ones));
      high[t] = _mm256_add_epi32(high[t], _mm256_madd_epi16(q, ones));
      in_this_order(low[t], high[t]);
    }
  }
  for (int t = 0; t < T; ++t) acc[t] = {low[t], high[t]};
}
// Eight pairs of products with 0..15 are 8 * 2 * 15 * 127 at most: 16 bits hold them.
template <int T>
static inline void dot_int4(const uint8_t* w, const int8_t* const* x, I* acc) {
  const __m256i ones = _mm256_set1_epi16(1), half = _mm256_set1_epi8(15);
  __m256i low[T], high[T];
  for (int t = 0; t < T; ++t) low[t] = high[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int s = 0; s < 4; ++s, w += 64) {
    const __m256i lo = _mm256_load_si256((const __m256i*)w);
    const __m256i hi = _mm256_load_si256((const __m256i*)(w + 32));
    fetch_ahead(w);
    const __m256i a = _mm256_and_si256(lo, half), c = _mm256_and_si256(hi, half);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(lo, 4), half);
    const __m256i d = _mm256_and_si256(_mm256_srli_epi16(hi, 4), half);
    for (int t = 0; t < T; ++t) {
      __m256i four = four_to_all(x[t] + 8 * s);
      low[t] = _mm256_add_epi16(low[t], _mm256_maddubs_epi16(a, four));
      high[t] = _mm256_add_epi16(high[t], _mm256_maddubs_epi16(c, four));
      four = four_to_all(x[t] + 8 * s + 4);
      low[t] = _mm256_add_epi16(low[t], _mm256_maddubs_epi16(b, four));
      high[t] = _mm256_add_epi16(high[t], _mm256_maddubs_epi16(d, four));
      in_this_order(low[t], high[t]);
    }
  }
  for (int t = 0; t < T; ++t) acc[t] = {_mm256_madd_epi16(low[t], ones), _mm256_madd_epi16(high[t], ones)};
}
#else
template <int T>
static inline void dot_int8(const uint8_t* w, int steps, const int8_t* const* x, I* acc) {
  for (int t = 0; t < T; ++t) acc[t] = {};
  for (int s = 0; s < steps; ++s)
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < LANES; ++r)
        for (int j = 0; j < 4; ++j)
          acc[t].v[r] += (int)(int8_t)w[s * 64 + r * 4 + j] * x[t][4 * s + j];
}
template <int T>
static inline void dot_int4(const uint8_t* w, const int8_t* const* x, I* acc) {
  for (int t = 0; t < T; ++t) acc[t] = {};
  for (int s = 0; s < 4; ++s)
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < LANES; ++r)
        for (int j = 0; j < 4; ++j) {
          int both = w[s * 64 + r * 4 + j];
          acc[t].v[r] += (both & 15) * x[t][8 * s + j] + (both >> 4) * x[t][8 * s + 4 + j];
        }
}
#endif

template <int T>
static NOT_INLINED void panel_int8(const Matrix& m, const Input& in, int panel, int token, F* out) {
  const int groups = m.groups(), steps = m.group / 4;
  const uint8_t* w = m.data + panel * m.panel_bytes();
  const float* d = (const float*)m.scales + (size_t)panel * groups * LANES;
  const float* scale = in.scale + token;
  F total[T];
  for (int t = 0; t < T; ++t) total[t] = zero();
  for (int g = 0; g < groups; ++g, d += LANES, scale += in.tokens) {
    const int8_t* x[T];
    I acc[T];
    for (int t = 0; t < T; ++t) x[t] = in.q + (size_t)(token + t) * in.cols + g * m.group;
    dot_int8<T>(w + (size_t)g * m.group * LANES, steps, x, acc);
#if DS_VNNI
    I off = load_i(m.sums + ((size_t)panel * groups + g) * LANES);
    off.v = _mm512_slli_epi32(off.v, 7);
    for (int t = 0; t < T; ++t) acc[t].v = _mm512_sub_epi32(acc[t].v, off.v);
#endif
    const F rows = load(d);
    for (int t = 0; t < T; ++t) total[t] = fma(to_float(acc[t]), rows * all(scale[t]), total[t]);
  }
  for (int t = 0; t < T; ++t) out[t] = total[t];
}

template <int T>
static NOT_INLINED void panel_int4(const Matrix& m, const Input& in, int panel, int token, F* out) {
  const int groups = m.groups();
  const uint8_t* w = m.data + panel * m.panel_bytes();
  const uint16_t* dm = (const uint16_t*)m.scales + (size_t)panel * groups * 2 * LANES;
  const float *scale = in.scale + token, *sum = in.sum + token;
  F total[T];
  for (int t = 0; t < T; ++t) total[t] = zero();
  for (int g = 0; g < groups; ++g, dm += 2 * LANES, w += 16 * LANES, scale += in.tokens, sum += in.tokens) {
    const int8_t* x[T];
    I acc[T];
    for (int t = 0; t < T; ++t) x[t] = in.q + (size_t)(token + t) * in.cols + g * 32;
    dot_int4<T>(w, x, acc);
    F d = from_half(dm), least = from_half(dm + LANES);
    for (int t = 0; t < T; ++t) {
      total[t] = fma(to_float(acc[t]), d * all(scale[t]), total[t]);
      total[t] = fma(least, all(sum[t]), total[t]);
    }
  }
  for (int t = 0; t < T; ++t) out[t] = total[t];
}

// ------------------------------------------------------------------------- any matrix

// `tile(size, first token)` for all tokens, in tiles of about one size that is `most` at most.
template <class Tile>
static inline void in_tiles(int tokens, int most, Tile tile) {
  int tiles = (tokens + most - 1) / most;
  for (int t = 0; t < tokens; --tiles) {
    const int size = (tokens - t + tiles - 1) / tiles;
    tile(size, t);
    t += size;
  }
}

// Kernels by their number of tokens, from 1.
using Kernel = void (*)(const Matrix&, const Input&, int panel, int token, F* out);
template <int P, bool HALF, int... T>
static constexpr std::array<Kernel, sizeof...(T)> float_kernels(std::integer_sequence<int, T...>) {
  return {panels_float<T + 1, P, HALF>...};
}
template <int... T>
static constexpr std::array<Kernel, sizeof...(T)> int8_kernels(std::integer_sequence<int, T...>) {
  return {panel_int8<T + 1>...};
}
template <int... T>
static constexpr std::array<Kernel, sizeof...(T)> int4_kernels(std::integer_sequence<int, T...>) {
  return {panel_int4<T + 1>...};
}

// Those of a matrix that read `P` panels together.
template <int P>
static inline Kernel kernel(const Matrix& m, int tokens) {
  using Whole = std::make_integer_sequence<int, WHOLE_TILE>;
  using Float = std::make_integer_sequence<int, P == 4 ? 1 : P == 2 ? PAIR_TILE : FLOAT_TILE>;
  static constexpr auto int8 = int8_kernels(Whole()), int4 = int4_kernels(Whole());
  static constexpr auto half = float_kernels<P, true>(Float()), full = float_kernels<P, false>(Float());
  switch (m.format) {
    case INT8: return int8[tokens - 1];
    case INT4: return int4[tokens - 1];
    case BFLOAT16: return half[tokens - 1];
    default: return full[tokens - 1];
  }
}

// `write(token, first row, F)` for panels [from, to) and tokens [0, tokens): the bias is added.
template <class Write>
static inline void multiply(const Matrix& m, const Input& in, int from, int to, int tokens, Write write) {
  auto give = [&](int panel, int token, F value) {
    if (m.bias) value = value + load(m.bias + (size_t)panel * LANES);
    write(token, panel * LANES, value);
  };
#if DS_TILES
  if (fits_tiles(m)) return multiply_in_tiles(m, in, from, to, tokens, give);
#endif
  F out[2 * FLOAT_TILE];
  int panel = from;
  auto panels = [&](auto together, int most) {
    constexpr int P = decltype(together)::value;
    for (; panel + P <= to; panel += P)
      in_tiles(tokens, most, [&](int size, int token) {
        kernel<P>(m, size)(m, in, panel, token, out);
        for (int i = 0; i < size; ++i)
          for (int p = 0; p < P; ++p) give(panel + p, token + i, out[i * P + p]);
      });
  };
  if (m.whole()) return panels(Number<1>(), WHOLE_TILE);
  if (tokens == 1) panels(Number<4>(), 1);  // one sum alone hides nothing of what an addition waits
  if (tokens <= PAIR_TILE || (DS_VNNI && tokens > FLOAT_TILE)) panels(Number<2>(), PAIR_TILE);
  panels(Number<1>(), FLOAT_TILE);
}
